"""inspect, convert and verify from the shell: what is printed, and how it ends."""

import json
import os
import re
import sys
from importlib.metadata import version

import pytest
import torch

from shardwise import checkpoint, cli
from shardwise.storage.folders import OutputFolder
from shardwise.storage.locks import claim_folder

WEIGHTS = {"layers.0.q": torch.arange(24.0).reshape(4, 6), "layers.0.k": torch.ones(2, 6), "norm": torch.zeros(6)}


@pytest.fixture
def shell(monkeypatch, capsys, tmp_path):
    """Runs a command in a directory of its own: the exit code, and all that was printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["shardwise", *words])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        return code, "".join(capsys.readouterr())

    return run


def test_names_with_brackets_are_taken_as_they_are(shell, tmp_path):
    torch.save({"a[0]": torch.zeros(2), "a0": torch.ones(2)}, tmp_path / "in.pt")
    options = ["--select", "a[0]", "--rename", "a[0]=b[0]", "--cast", "b[0]=int8"]
    code, said = shell("convert", "in.pt", "out.safetensors", *options)
    assert (code, list(checkpoint.open("out.safetensors"))) == (0, ["b[0]"]), said
    torch.testing.assert_close(checkpoint.open("out.safetensors")["b[0]"].read(), torch.zeros(2, dtype=torch.int8))
    assert shell("verify", "in.pt", "out.safetensors", *options)[0] == 0


@pytest.fixture
def saved(tmp_path):
    checkpoint.save({**WEIGHTS, "step": 7}, tmp_path / "saved")
    return "saved"


def test_a_checkpoint_is_listed_as_a_table_a_tree_or_json(shell, saved):
    code, table = shell("inspect", saved)
    assert code == 0
    summary, _, titles, first, *_ = table.splitlines()
    assert summary.endswith("saved: sharded, 3 tensors (168 B float32) in 1 file, 1 other value")
    assert titles.split() == ["name", "tensors", "dtype", "shape", "shards", "layout", "size"]
    assert first.split() == [
        "layers.0.q",
        "float32",
        "4",
        "x",
        "6",
        "1",
        "whole",
        "96",
        "B",
    ]
    assert re.search("step +int +7", table)
    code, tree = shell("inspect", saved, "--tree")
    assert code == 0
    assert "├── layers  144 B" in tree
    assert "k  float32 [2, 6]  48 B" in tree
    code, text = shell("inspect", saved, "--json")
    said = json.loads(text)
    assert (code, said["format"], said["bytes"], said["objects"]) == (0, "sharded", 168, {"step": 7})
    (shard,) = said["tensors"]["layers.0.k"]["shards"]
    assert shard["box"] == [[0, 0], [2, 6]]
    assert shard["stop"] - shard["start"] == 48


def test_everything_can_be_asked_for_in_a_conversion(shell, saved):
    code, text = shell(
        *("convert", saved, "out", "--max-shard-size", "100", "--no-bar", "--rename", "layers.*=blocks.*"),
        *("--concat", "*.qk=*.q,*.k", "--cast", "norm=bfloat16", "--jobs", "2", "--max-bytes", "1MiB"),
    )
    assert code == 0
    assert "every cell is right" in text
    found = checkpoint.open("out")
    assert torch.equal(found["blocks.0.qk"].read(), torch.cat([WEIGHTS["layers.0.q"], WEIGHTS["layers.0.k"]]))
    assert found["norm"].dtype == torch.bfloat16
    assert len({file for entry in found.values() for file in entry.used()}) == 2
    code, _ = shell(
        *("convert", "out", "back.pt", "--no-bar", "--concat", "*.qk=*.q,*.k:4,2", "--rename", "blocks.*=layers.*")
    )
    assert code == 0
    back = torch.load("back.pt", weights_only=True)
    assert torch.equal(back["layers.0.k"], WEIGHTS["layers.0.k"])
    code, text = shell("convert", saved, "picked", "--no-bar", "--no-verify", "--select", "norm")
    assert (code, list(checkpoint.open("picked"))) == (0, ["norm"])
    assert "every cell" not in text


def test_parts_by_rules(shell, saved, tmp_path):
    (tmp_path / "rules.toml").write_text(
        '[[rule]]\nname = "*.[qk]"\nplacements = "S0"\n[[rule]]\nname = "*"\nplacements = "R"\n'
    )
    code, _ = shell(
        "convert", saved, "tp2", "--format", "sharded", "--rules", "rules.toml", "--mesh", "tp=2", "--no-bar"
    )
    assert code == 0
    assert str(checkpoint.open("tp2")["layers.0.q"].layout) == "4x6/S0@2"
    assert shell("verify", saved, "tp2", "--no-bar")[0] == 0


def test_what_differs_is_listed_and_ends_with_one(shell, saved):
    torch.save({**WEIGHTS, "norm": torch.tensor([0.0, 0, 0, 0, 1, 0])}, "other.pt")
    code, text = shell("verify", saved, "other.pt", "--no-bar", "--jobs", "2")
    assert (code, text) == (1, "norm: 1 or more cells differ in [4:5]\nstep: ./other.pt has no 'step'\n")
    torch.save({**WEIGHTS, "step": 7}, "same.pt")
    code, text = shell("verify", saved, "same.pt")
    assert code == 0
    assert "equal, bit-for-bit" in text
    assert "MiB" not in text  # no bar where nobody looks at it


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", "nothing"], "no such file or directory: nothing"),
        (["verify", "saved", "nothing"], "no such file or directory: nothing"),
        (["convert", "saved", "x", "--format", "zip"], "--format must be one of"),
        (["convert", "saved", "x.foo"], "one of .safetensors, .pt, .pth, .bin, or give --format"),
        (["convert", "saved", "x", "--max-bytes", "5"], "--max-bytes 5 is too little"),
        (["convert", "saved", "x", "--cast", "float31"], "'float31' is not a torch dtype"),
        (["convert", "saved", "x", "--rename", "a"], "--rename 'a' is not a pair"),
        (["convert", "saved", "x", "--concat", "a=b@one"], "write whole numbers for dim and sizes"),
        (["convert", "saved", "x", "--max-shard-size", "big"], "'big' is not a size"),
        (["convert", "saved", "x", "--mesh", "tp=2"], "--mesh needs --rules"),
        (["convert", "saved", "x", "--format", "sharded", "--rules", "llamas", "--mesh", "tp=2"], "llama"),
        (["convert", "saved", "x", "--select", "y*"], "which matches no name"),
    ],
)
def test_bad_input_ends_with_two_and_one_message(shell, saved, words, said, tmp_path):
    code, text = shell(*words)
    assert code == 2
    assert text.startswith("error: ")
    assert said in text
    assert not (tmp_path / "x").exists() or not list((tmp_path / "x").iterdir())


def test_values_that_a_format_does_not_hold_are_told(shell, saved):
    code, text = shell("convert", saved, "one.safetensors", "--no-bar")
    assert (code, text.splitlines()[-1]) == (0, "left out: 1 other value, such as step")
    code, text = shell("convert", saved, "one.pt", "--no-bar")
    assert code == 0
    assert "left out" not in text


def test_the_version_is_told(shell):
    code, text = shell("--version")
    assert (code, text.strip()) == (0, version("shardwise"))
    assert shell("convert", "-h")[0] == 0


def test_ctrl_c_says_that_the_same_command_continues_and_that_command_says_what_it_reuses(shell, saved, monkeypatch):
    command = ("convert", saved, "out", "--max-shard-size", "100", "--no-bar")
    replace, calls = os.replace, []

    def interrupt(old, new):
        calls.append(new)
        if len(calls) == 3:  # the checksums of a file come before it
            raise KeyboardInterrupt
        replace(old, new)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupt)
        code, text = shell(*command)
    assert code == 130
    assert text == "interrupted: run the same command again to continue; files that are whole are reused\n"
    code, text = shell(*command)
    assert code == 0
    assert text.startswith("reused 1 file of an earlier conversion, such as model-00001-of-00002.safetensors\n")


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors"])
def test_ctrl_c_promises_nothing_of_one_file(shell, saved, monkeypatch, out):
    def interrupt(old, new):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupt)
        assert shell("convert", saved, out, "--no-bar") == (130, "interrupted: run the same command again\n")
    assert shell("convert", saved, out, "--no-bar")[0] == 0


def test_rules_are_found_by_the_config(shell, tmp_path):
    name = "model.layers.0.self_attn.k_proj.weight"
    torch.save({name: torch.randn(16, 64)}, tmp_path / "model.pt")
    auto = ("convert", "model.pt", "tp4", "--format", "sharded", "--rules", "auto", "--mesh", "tp=4", "--no-bar")
    code, text = shell(*auto)
    assert code == 2
    assert "config.json is missing, by which --rules auto finds the rules: name them, as in --rules llama" in text
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, text = shell(*auto)
    assert (code, "every cell is right" in text) == (0, True)
    assert checkpoint.open(tmp_path / "tp4")[name].shape == (16, 64)
    code, text = shell(*auto[:2], "other", *auto[3:6], "config.json", "--mesh", "tp=3", "--no-bar")
    assert code == 2
    assert "3 ranks cut 8 heads (num_attention_heads = 8)" in text


def test_sharded_files_need_rules_and_the_error_has_some_that_work(shell, saved, tmp_path):
    code, text = shell("convert", saved, "x", "--format", "sharded", "--no-bar")
    assert code == 2
    assert "--format sharded needs --rules: which part of a tensor each rank has" in text
    lines = text.strip().partition("the two lines ")[2].split(" and ")
    (tmp_path / "one.toml").write_text("\n".join(lines))
    assert shell("convert", saved, "x", "--format", "sharded", "--rules", "one.toml", "--no-bar")[0] == 0
    assert shell("verify", saved, "x", "--no-bar")[0] == 0


@pytest.mark.parametrize("format", ["torch.save", "dcp"])
def test_inspect_shows_ties_and_other_values(shell, tmp_path, format):
    weight = torch.ones(64, 16)
    torch.save({"embed": {"w": weight}, "head": {"w": weight}, "step": 7, "m": torch.nn.Linear(2, 2)}, "tied.pt")
    checkpoint.convert("tied.pt", "out", format=format, objects="carry")
    for words in ["inspect", "out"], ["inspect", "out", "--tree"]:
        code, text = shell(*words)
        assert code == 0
        assert "tied to embed.w" in text
        assert re.search("step +int +7", text)
        assert "with 2 tensors inside" in text
        assert "2 tensors, 1 of them tied (4.00 KiB float32)" in text
    _, text = shell("inspect", "out", "--json")
    assert {name: one["tied"] for name, one in json.loads(text)["tensors"].items()} == {
        "embed.w": None,
        "head.w": "embed.w",
    }


def test_verify_finds_names_that_differ_in_a_prefix(shell, saved):
    torch.save({**{f"model.{name}": value for name, value in WEIGHTS.items()}, "step": 7}, "prefixed.pt")
    code, text = shell("verify", saved, "prefixed.pt")
    assert (code, text.splitlines()[-1]) == (1, "the names differ in a prefix: try --rename '*=model.*'")
    torch.save(WEIGHTS, "w.pt")
    torch.save({f"model.{name}": value for name, value in WEIGHTS.items()}, "prefixed.pt")
    assert shell("verify", "w.pt", "prefixed.pt", "--rename", "*=model.*")[0] == 0


def test_ctrl_c_ends_with_one_line(shell, saved, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "open", interrupt)
    assert shell("inspect", saved) == (130, "stopped\n")


def test_without_torch_one_line_says_so(shell, saved, monkeypatch):
    def missing(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(checkpoint, "open", missing)
    assert shell("inspect", saved) == (2, "error: this command needs torch: pip install torch\n")


def test_alike_tensors_share_a_line(shell):
    layers = {f"h.{n}.{part}": torch.ones(4, 2) for n in range(12) for part in ("q", "k")}
    odd = {"h.7.k": torch.ones(4, 3), "h.12.k": torch.ones(4, 2), "h.01.k": torch.ones(4, 2), "norm": torch.ones(2)}
    torch.save({**layers, **odd, "step": 7}, "p.pt")
    _, text = shell("inspect", "p.pt")
    assert [line.split()[:2] for line in text.splitlines()[3:]] == [
        ["h.{0..11}.q", "12"],
        ["h.{0..6,8..12}.k", "12"],
        ["h.7.k", "float32"],
        ["h.01.k", "float32"],
        ["norm", "float32"],
        ["step", "int"],
    ]
    assert "  384 B\n" in text
    _, text = shell("inspect", "p.pt", "--all", "--filter", "h.?.q")
    assert [line.split()[0] for line in text.splitlines()[3:]] == [f"h.{n}.q" for n in range(10)]
    _, text = shell("inspect", "p.pt", "--limit", "2")
    assert text.splitlines()[-1] == "... and 4 more lines"
    _, text = shell("inspect", "p.pt", "--depth", "1")
    assert [line.split("  ")[0] for line in text.splitlines()[3:]] == ["├── h", "├── norm", "└── step"]
    code, text = shell("inspect", "p.pt", "--filter", "hh.0.q")
    assert (code, text) == (2, "error: ./p.pt: no name matches 'hh.0.q' (nearest: 'h.0.q')\n")


def test_a_conversion_to_where_another_one_writes_says_so(shell, saved):
    with claim_folder(OutputFolder("out"), "0" * 16):
        code, text = shell("convert", saved, "out", "--max-shard-size", "100", "--no-bar")
    assert code == 2
    assert "another save or conversion is writing to out (process" in text
    assert text.endswith("wait until it ends, or give another path\n")


@pytest.mark.filterwarnings("default::UserWarning")
def test_tied_tensors_that_are_written_twice_are_a_note(shell, tmp_path):
    torch.save({"embed": WEIGHTS["norm"], "head": WEIGHTS["norm"]}, tmp_path / "in.pt")
    code, text = shell("convert", "in.pt", "out.safetensors", "--no-bar")
    assert code == 0
    assert (
        "note: 'head' is tied to 'embed': safetensors cannot share bytes, so it is written again (24 B in all)" in text
    )


# --- one checkpoint and its own checksums -----------------------------------------------------------------------------


def test_a_whole_checkpoint_is_verified_alone(shell, saved):
    assert shell("verify", saved, "--no-bar") == (
        0,
        "whole: every byte of saved matches the checksums that were written with it\n",
    )


def test_damage_is_listed_and_ends_with_code_1(shell, saved, tmp_path):
    (file,) = (tmp_path / saved).glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    code, text = shell("verify", saved, "--no-bar")
    assert code == 1
    boxes = "layers.0.q in [0:4, 0:6], layers.0.k in [0:2, 0:6], norm in [0:6]"
    assert text == f"{file.name}, bytes 0 to {len(data)}: does not match its checksum: {boxes}\n"


def test_what_has_no_checksums_cannot_be_verified_alone(shell, saved):
    assert shell("convert", saved, "out.pt", "--no-sums", "--no-bar")[0] == 0
    code, text = shell("verify", "out.pt")
    assert code == 2
    assert "out.pt has no checksums: nothing can be checked" in text


def test_options_that_compare_need_a_second_checkpoint(shell, saved):
    code, text = shell("verify", saved, "--select", "norm")
    assert code == 2
    assert "options that compare need a second checkpoint, B" in text


def test_config_files_are_named_or_copied(shell, tmp_path):
    (tmp_path / "in").mkdir()
    checkpoint.convert(_stored(tmp_path), tmp_path / "in")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "in" / name).write_text("{}")
    code, said = shell("convert", "in", "out")
    assert (code, "not copied: config.json, tokenizer.json: --with-config copies them" in said) == (0, True), said
    for option in (["--with-config"], ["--config-from", "in"]):
        code, said = shell("convert", "in", f"out{option[0]}", *option)
        assert (code, "not copied" in said) == (0, False), said
        assert (tmp_path / f"out{option[0]}" / "tokenizer.json").read_text() == "{}"
    code, said = shell("convert", "out", "bare", "--with-config")
    assert (code, "leave out --with-config, or give --config-from FOLDER" in said) == (2, True), said


def test_names_are_excluded_and_several_are_selected(shell, tmp_path):
    _stored(tmp_path)
    options = ["--select", "layers.*", "--select", "norm", "--exclude", "*.k"]
    assert shell("convert", "stored.pt", "out.safetensors", *options)[0] == 0
    assert sorted(checkpoint.open("out.safetensors")) == ["layers.0.q", "norm"]
    assert shell("verify", "stored.pt", "out.safetensors", *options)[0] == 0
    code, said = shell("convert", "stored.pt", "b.safetensors", "--exclude", "nothing.*")
    assert (code, "--exclude has 'nothing.*', which matches no name" in said) == (2, True), said


def _stored(tmp_path):
    torch.save(WEIGHTS, tmp_path / "stored.pt")
    return tmp_path / "stored.pt"
