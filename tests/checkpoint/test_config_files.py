"""config, tokenizer and generation files go with the weights of a conversion, if that is asked for."""

import json

import pytest
import torch
from checkpoints import names_in
from safetensors.torch import save_file

from shardwise import checkpoint
from shardwise.errors import CheckpointError

CONFIG = {"model_type": "llama", "torch_dtype": "float32", "text_config": {"dtype": "float32", "heads": 2}}
OTHERS = {"generation_config.json": "{}", "tokenizer.json": "{ }", "tokenizer.model": "x", "merges.txt": "a b"}
NEVER = {"optimizer.pt": "", "README.md": "", "modeling_own.py": "import os", "training_args.json": "{}"}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(8, 4), "n": torch.ones(2)}, folder / "model.safetensors")
    for name, text in {**OTHERS, **NEVER, "config.json": json.dumps(CONFIG)}.items():
        (folder / name).write_text(text)
    return folder


def test_they_are_copied_as_they_are(model, tmp_path):
    made = checkpoint.convert(model, tmp_path / "out", with_config=True)
    assert names_in(tmp_path / "out") == sorted([*OTHERS, "config.json", "model.safetensors"])
    for name in (*OTHERS, "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    assert not checkpoint.verify(made)
    checkpoint.convert(model, tmp_path / "plain")
    assert names_in(tmp_path / "plain") == ["model.safetensors"]


def test_the_config_names_the_dtype_of_the_weights(model, tmp_path):
    checkpoint.convert(model, tmp_path / "out", with_config=True, cast=[torch.bfloat16, ("n", torch.float32)])
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said == {**CONFIG, "torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "heads": 2}}


def test_codes_that_became_values_are_not_announced_and_new_codes_are_refused(model, tmp_path):
    codes = {"w": torch.ones(8, 4).to(torch.float8_e4m3fn), "w_scale": torch.ones(8, 1)}
    save_file(codes, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "fp8"}}))
    rule = checkpoint.Quantized("w", "w_scale", format="fp8-row")
    checkpoint.convert(model, tmp_path / "out", with_config=True, remap=[rule])
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    with pytest.raises(CheckpointError, match="does not say how weights are quantized now"):
        checkpoint.convert(tmp_path / "out", tmp_path / "again", with_config=True, remap=[rule])
    assert not (tmp_path / "again").exists()


def test_another_folder_has_them_and_files_that_are_there_stay(model, tmp_path):
    checkpoint.save({"w": torch.ones(8, 4)}, tmp_path / "training")
    with pytest.raises(CheckpointError, match=r"training has no config\.json and no tokenizer"):
        checkpoint.convert(tmp_path / "training", tmp_path / "out", with_config=True)
    checkpoint.convert(tmp_path / "training", tmp_path / "out", format="safetensors", with_config=model)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json is there with other contents"):
        checkpoint.convert(model, tmp_path / "taken", with_config=True)
    assert names_in(tmp_path / "taken") == ["config.json"]
