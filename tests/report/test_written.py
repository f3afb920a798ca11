"""Pages from the shell, of checkpoints and of models that are synced."""

import os
import resource
import sys

import pytest
import torch
from embedded import data
from ranks import ranks  # noqa: F401

import shardwise as sw
from shardwise import checkpoint, cli
from shardwise.report import page, write


def shell(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["shardwise", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


def test_a_plan_is_written_as_a_page(monkeypatch, tmp_path):
    path = tmp_path / "plan.html"
    assert shell(monkeypatch, "plan", "8x6/S0@4", "8x6/S1@3", "--itemsize", "2", "--html", path) == 0
    assert path.read_text() == page(sw.plan("8x6/S0@4", "8x6/S1@3", itemsize=2))


def test_a_layout_is_written_as_a_page(monkeypatch, tmp_path):
    path = tmp_path / "layout.html"
    assert shell(monkeypatch, "show", "8x6/S0@4", "--html", path) == 0
    assert path.read_text() == page(sw.parse("8x6/S0@4"))


def test_a_page_that_cannot_be_written_ends_with_code_2(monkeypatch, tmp_path, capsys):
    path = tmp_path / "no" / "plan.html"
    assert shell(monkeypatch, "plan", "8x6/S0@4", "8x6/S1@3", "--html", path) == 2
    assert f"No such file or directory: '{path}'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_what_cannot_be_written_whole_leaves_what_was_there(monkeypatch, tmp_path, capsys, option):
    path = tmp_path / "earlier"
    path.write_text("<!doctype html>as it was")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert shell(monkeypatch, "plan", "8x6/S0@4", "8x6/S1@3", option, path) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"File too large: '{path}'" in capsys.readouterr().err
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"earlier": "<!doctype html>as it was"}


def test_a_link_stays_one_and_what_it_leads_to_is_written(monkeypatch, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    assert shell(monkeypatch, "show", "8x6/S0@4", "--html", tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page.html").read_text() == page(sw.parse("8x6/S0@4"))


def test_a_pipe_stays_one_and_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    at = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(tmp_path / "pipe", "a page")
        assert os.read(at, 100) == b"a page"
    finally:
        os.close(at)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("path", ["folder", "."])
def test_a_directory_is_no_place_for_a_page(monkeypatch, tmp_path, capsys, path):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert shell(monkeypatch, "show", "8x6/S0@4", "--html", path) == 2
    assert f"Is a directory: '{path}'" in capsys.readouterr().err


def test_only_pages_are_replaced_by_pages(monkeypatch, tmp_path, capsys):
    checkpoint.save({"w": torch.zeros(3)}, tmp_path / "saved")
    page_path, other = tmp_path / "page.html", tmp_path / "saved" / "shardwise.json"
    for _ in range(2):
        assert shell(monkeypatch, "inspect", tmp_path / "saved", "--html", page_path) == 0
    before = other.read_bytes()
    assert shell(monkeypatch, "inspect", tmp_path / "saved", "--html", other) == 2
    assert "exists and is not a page: choose another path" in capsys.readouterr().err
    assert other.read_bytes() == before


def test_a_checkpoint_is_written_as_a_page(monkeypatch, tmp_path):
    weights = {"layers.0.q": torch.arange(24.0).reshape(4, 6), "norm": torch.zeros(6, dtype=torch.bfloat16)}
    checkpoint.save({**weights, "step": 7}, tmp_path / "saved")
    path = tmp_path / "page.html"
    assert shell(monkeypatch, "inspect", tmp_path / "saved", "--html", path) == 0
    found = data(path.read_text())
    assert [(row[0], row[2], found["dtypes"][row[3]]) for row in found["rows"]] == [
        ("layers.0.q", 96, "float32"),
        ("norm", 12, "bfloat16"),
    ]
    assert (found["owner"], found["unit"], found["facts"]["size"]) == ("file", "bytes", "108 B")
    assert found["names"] == checkpoint.open(tmp_path / "saved")["norm"].used()


def test_a_model_that_is_synced_has_a_page(ranks, tmp_path):  # noqa: F811
    def run(rank):
        whole = torch.arange(48.0).reshape(8, 6)
        source = {
            "layers.0.w": sw.ShardedTensor(whole[4 * rank : 4 * rank + 4], "8x6/S0@2"),
            "q": sw.ShardedTensor(whole[4 * rank : 4 * rank + 4], "8x6/S0@2"),
        }
        target = {
            "layers.0.w": sw.ShardedTensor(whole[:, 3 * rank : 3 * rank + 3] * 0, "8x6/S1@2"),
            "wq": sw.ShardedTensor(whole[:, 3 * rank : 3 * rank + 3] * 0, "8x6/S1@2"),
        }
        plan = sw.Resharder(source, target, rename={"q": "wq"}).plan
        return plan.html(tmp_path / f"{rank}.html", title="sync").read_text(), plan.bytes_moved, plan.peak_bytes

    found = ranks(2, run)
    assert found[0] == found[1]
    text, moved, peak = found[0]
    held = data(text)
    assert held["title"] == "sync"
    assert held["together"]["totals"]["moved"] == moved
    assert held["facts"] == {"exchanges": "1", "a rank stages at most": f"{peak} B"}
    assert [[row[0], row[1], row[4]] for row in held["rows"]] == [["layers.0.w", 0, ""], ["wq", 0, "from q"]]


def test_parts_of_a_tensor_are_named_by_their_boxes(ranks, tmp_path):  # noqa: F811
    def run(rank):
        half = torch.arange(24.0).reshape(4, 6)
        source = {name: sw.ShardedTensor(half.clone(), "8x6/S0@2") for name in "qk"}
        target = {"qk": sw.ShardedTensor(torch.zeros(16, 3), "16x6/S1@2")}
        plan = sw.Resharder(source, target, remap=[sw.Concat("qk", ["q", "k"])]).plan
        return plan.html(tmp_path / f"{rank}.html").read_text()

    rows = data(ranks(2, run)[0])["rows"]
    assert [(row[0], row[4]) for row in rows] == [("qk [0:8, 0:6]", "from q"), ("qk [8:16, 0:6]", "from k")]
