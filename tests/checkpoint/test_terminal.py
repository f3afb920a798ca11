"""Names in files that would steer a terminal: nothing of them is ever printed raw."""

import contextlib
import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from checkpoints import numbers

import shardwise as sw
from shardwise import checkpoint, cli
from shardwise.checkpoint.formats.safetensors import header_bytes
from shardwise.quoting import brief, in_line, printable

EVIL = "w\x1b[2J\x1b]0;owned\x07\r\n\u202e\x9b31m\x7f\b"
SURROGATE = "s\udc80\ud800"


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """Every test has a directory of its own to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def printed(monkeypatch, capsys):
    """What the command line prints, which must be harmless."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["shardwise", *arguments])
        with contextlib.suppress(SystemExit):
            cli.main()
        said = "".join(capsys.readouterr())
        assert harmless(said), said
        return said

    return run


def harmless(text):
    return all(character.isprintable() or character == "\n" for character in text)


def evil_checkpoints():
    """Of every format, with such names of files, tensors and values; each as a path."""
    names = [EVIL, SURROGATE, "plain"]
    folder = Path("dir\x1b[2J\u202e")
    folder.mkdir()
    torch.save({EVIL: {EVIL: numbers(4)}, "v": {EVIL: EVIL}, "plain": numbers(2)}, folder / f"{EVIL[:6]}.pt")
    yield str(folder / f"{EVIL[:6]}.pt")
    file = folder / "\x1b[31m.safetensors"
    tensors = dict.fromkeys(names, (torch.float32, (4,)))
    file.write_bytes(header_bytes(tensors, {EVIL: EVIL}) + bytes(48))
    yield str(file)
    yield str(folder)
    for format in "safetensors", "dcp":
        path = str(folder / f"{format}\x1b[0m")
        checkpoint.save({EVIL: numbers(4), "deep": {EVIL: numbers(3)}, "value\x1b": EVIL}, path, format=format)
        yield path


def test_no_command_prints_control_characters(printed):
    good = "good.pt"
    torch.save({"plain": numbers(5), "w": numbers(4), "other\x1b[2J": 3}, good)
    for number, path in enumerate(evil_checkpoints()):
        assert "plain" in printed("inspect", path) or number > 2
        for options in ["--tree"], ["--json"], ["--html", f"page{number}.html"]:
            printed("inspect", path, *options)
        if Path(f"page{number}.html").exists():
            assert harmless(Path(f"page{number}.html").read_text().replace("\t", " "))
        printed("verify", path, good, "--all", "--no-bar")
        printed("verify", good, path, "--all", "--no-bar")
        printed("verify", path, path, "--no-bar")
        printed("convert", path, f"out\x1b[2J{number}.safetensors", "--no-bar")
        printed("convert", path, f"out{number}.pt", "--no-bar")
        printed("inspect", f"{path}/nothing\x1b[2J")
        printed("inspect", path, "--rules", "llama", "--mesh", "tp=2")
    printed("show", "8x6/S0@2\x1b[2J")
    printed("plan", "8x6/S0@2", "8x6/\x1b[2J@2")


@pytest.mark.parametrize("name", [EVIL, SURROGATE, "a\x00b"])
def test_errors_of_damaged_files_are_harmless(name):
    text = json.dumps({name: {"dtype": name, "shape": [1], "data_offsets": [0, 4]}}).encode()
    Path("x\x1b.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(sw.CheckpointError) as error:
        checkpoint.open("x\x1b.safetensors")
    assert harmless(str(error.value))
    error.value.add_note(f"while reading {name}")
    assert harmless("".join(error.value.__notes__))


def test_files_of_surrogates_are_listed(printed):
    Path("p").mkdir()
    for name in b"\xff\xfe.txt", b"\x1b[2J.txt":
        Path("p", name.decode(errors="surrogateescape")).write_text("x")
    assert "\\udcff\\udcfe.txt" in printed("inspect", "p")


def test_warnings_are_harmless():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in evil_checkpoints():
            pass
    assert all(harmless(str(one.message)) for one in found)


def test_text_without_control_characters_stays_as_it_is():
    for text in "w[0].bias", "größe\nä", "模型.権重", "":
        assert printable(text) == text
    assert in_line("a\nb") == "a\\nb"


def test_a_value_that_contains_itself_is_shown():
    value = [1]
    value.append(value)
    assert brief(value) == "[1, [1, [1, [...]]]]"
    assert brief((1,)) == "(1,)"
    assert len(brief(dict.fromkeys(range(1000), "x" * 1000))) <= 100
