"""LoRA adapters that are merged on the way: the formula, to the last bit, and what is refused."""

import json
from math import sqrt

import pytest
import torch
from checkpoints import same_tensors
from safetensors.torch import load_file, save_file

from shardwise import checkpoint
from shardwise.errors import CheckpointError

SIZES = {"layers.0.up": (70, 33), "layers.0.down": (33, 70), "layers.1.square": (40, 40)}


def numbers(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    tensors = {f"{name}.weight": numbers(*shape, dtype=torch.bfloat16) for name, shape in SIZES.items()}
    tensors["norm"] = numbers(33)
    save_file(tensors, tmp_path / "base.safetensors")
    return tensors


def adapter(tmp_path, tensors=None, **config):
    """The tensors of an adapter of rank 5, saved as peft saves them."""
    torch.manual_seed(1)
    made = {}
    for name, (out, into) in SIZES.items():
        made[f"base_model.model.{name}.lora_A.weight"] = numbers(5, into)
        made[f"base_model.model.{name}.lora_B.weight"] = numbers(out, 5)
    made = {**made, **(tensors or {})}
    made = {name: tensor for name, tensor in made.items() if tensor is not None}
    (tmp_path / "adapter").mkdir()
    save_file(made, tmp_path / "adapter" / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 5, "lora_alpha": 7, "target_modules": ["up"], "init_lora_weights": True, **config}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(said))
    return made


def summed(base, made, scale, turned=()):
    """The formula in float64, cell by cell in the order of the rank."""
    merged = dict(base)
    for name in SIZES:
        a, b = (made[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
        delta = torch.zeros(b.shape[0], a.shape[1], dtype=torch.float64)
        for k in range(5):
            delta += b[:, k, None] * a[None, k]
        weight = base[f"{name}.weight"].double()
        merged[f"{name}.weight"] = (weight + (delta * scale).mT if name in turned else weight + delta * scale).float()
    return merged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("max_bytes", [4096, 2**28])
def test_every_cell_is_the_formula_in_any_dtype_and_any_parts(tmp_path, base, dtype, max_bytes):
    made = adapter(tmp_path)
    options = {"merge": tmp_path / "adapter", "cast": dtype}
    checkpoint.convert(tmp_path / "base.safetensors", tmp_path / "out.safetensors", max_bytes=max_bytes, **options)
    expected = {name: tensor.to(dtype) for name, tensor in summed(base, made, 7 / 5).items()}
    same_tensors(load_file(tmp_path / "out.safetensors"), expected)
    assert not checkpoint.verify(tmp_path / "base.safetensors", tmp_path / "out.safetensors", **options)


def test_a_sharded_conversion_has_the_same_cells_and_the_dtype_of_the_base(tmp_path, base):
    made = adapter(tmp_path, use_rslora=True)
    rules = checkpoint.read_rules(
        {"mesh": {"tp": 3}, "rule": [{"name": "*.weight", "placements": "S1"}, {"name": "*", "placements": "R"}]}
    )
    options = {"format": "sharded", "rules": rules, "merge": tmp_path / "adapter"}
    found = checkpoint.convert(tmp_path / "base.safetensors", tmp_path / "out", **options)
    merged = summed(base, made, 7 / sqrt(5))
    same_tensors({n: e.read() for n, e in found.items()}, {n: t.to(base[n].dtype) for n, t in merged.items()})


def test_names_of_a_training_and_weights_with_inputs_first_are_found(tmp_path, base):
    made = adapter(tmp_path, fan_in_fan_out=True)
    turned = {f"app.model.{name}": one.mT.contiguous() if one.ndim == 2 else one for name, one in base.items()}
    torch.save(turned, tmp_path / "base.pt")
    found = checkpoint.convert(
        tmp_path / "base.pt", tmp_path / "out.pt", merge=tmp_path / "adapter", cast=torch.float32
    )
    wide = {name: one.mT if one.ndim == 2 else one for name, one in base.items()}
    merged = summed(wide, made, 7 / 5, turned=SIZES)
    same_tensors({name.removeprefix("app.model."): entry.read() for name, entry in found.items()}, merged)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora_alpha": float("nan")}, "the alpha nan"),
        ({"lora_alpha": True}, "the alpha True"),
        ({"alpha_pattern": ["up"]}, "are not values by patterns of names"),
        ({"alpha_pattern": {"(": 2}}, "is invalid: missing"),
    ],
)
def test_scales_that_are_no_numbers_are_refused(tmp_path, base, config, message):
    adapter(tmp_path, **config)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.convert(tmp_path / "base.safetensors", tmp_path / "out.pt", merge=tmp_path / "adapter")


def test_two_tensors_of_an_adapter_for_one_of_the_model_are_refused(tmp_path, base):
    adapter(tmp_path, {"base_model.model.n.bias": numbers(3), "base_model.model.n.base_layer.bias": numbers(3)})
    with pytest.raises(CheckpointError, match="are for the same tensor"):
        checkpoint.convert(tmp_path / "base.safetensors", tmp_path / "out.pt", merge=tmp_path / "adapter")


def test_an_adapter_that_fits_two_models_of_a_training_is_refused(tmp_path, base):
    adapter(tmp_path)
    torch.save({"module": base, "ema": base}, tmp_path / "base.pt")
    with pytest.raises(CheckpointError, match=r"'ema\.' and 'module\.': convert one of them with select= first"):
        checkpoint.convert(tmp_path / "base.pt", tmp_path / "out.pt", merge=tmp_path / "adapter")


def test_whole_tensors_of_an_adapter_take_the_place_of_others(tmp_path, base):
    norm = numbers(33)
    adapter(tmp_path, {"base_model.model.norm": norm})
    found = checkpoint.convert(tmp_path / "base.safetensors", tmp_path / "out.pt", merge=tmp_path / "adapter")
    torch.testing.assert_close(found["norm"].read(), norm, rtol=0, atol=0)


UP = "base_model.model.layers.0.up."
REFUSED = {
    "another method": ({"peft_type": "IA3"}, {}, "peft_type is 'IA3': only LORA is merged"),
    "an option that is not known": ({"use_later": True}, {}, "use_later is True, which is not a plain LoRA"),
    "parts of DoRA": (
        {},
        {f"{UP}lora_magnitude_vector": numbers(70)},
        "'base_model.*lora_magnitude_vector' is not a part",
    ),
    "half a pair": ({}, {f"{UP}lora_B.weight": None}, r"'layers.0.up' has lora_A only"),
    "another rank": ({"r": 4}, {}, r"gives 'layers\.\S+' the rank 4, but its lora_A has 5"),
    "no alpha": ({"lora_alpha": "7"}, {}, "the alpha '7'"),
    "a pattern that never ends": ({"rank_pattern": {"(a+)+": 5}}, {}, r"the pattern '\(a\+\)\+' is not one of names"),
    "a name that the base lacks": (
        {},
        {"base_model.model.other": numbers(3)},
        "lacks what .* is for: 'layers.0.up.weight'|'other'",
    ),
    "another shape": ({}, {"base_model.model.norm": numbers(3)}, r"has 'norm' of shape \(3,\), but .* \(33,\)"),
    "a LoRA of another shape": (
        {},
        {f"{UP}lora_B.weight": numbers(71, 5)},
        r"a LoRA of shape \(71, 33\) for 'layers.0.up.weight'",
    ),
    "names of another program": ({}, {"up.lora_A": numbers(3)}, "does not begin with 'base_model.model.'"),
    "codes": ({}, {f"{UP}lora_B.weight": torch.zeros(70, 5, dtype=torch.int8)}, "is torch.int8: only smaller floats"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses(tmp_path, base, what):
    config, tensors, message = REFUSED[what]
    adapter(tmp_path, tensors, **config)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.convert(tmp_path / "base.safetensors", tmp_path / "out", merge=tmp_path / "adapter")
    assert not (tmp_path / "out").exists()


def test_bases_that_cannot_be_merged_are_refused(tmp_path, base):
    adapter(tmp_path)
    codes = {**base, "layers.0.up.weight": base["layers.0.up.weight"].to(torch.float8_e4m3fn)}
    tied = {**base, "again": base["layers.0.up.weight"]}
    for tensors, message in ((codes, "is torch.float8_e4m3fn, and cannot be merged"), (tied, "is tied to 'again'")):
        torch.save(tensors, tmp_path / "bad.pt")
        with pytest.raises(CheckpointError, match=message):
            checkpoint.convert(tmp_path / "bad.pt", tmp_path / "out", merge=tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json beside it"):
        checkpoint.convert(tmp_path / "bad.pt", tmp_path / "out", merge=tmp_path / "base.safetensors")
