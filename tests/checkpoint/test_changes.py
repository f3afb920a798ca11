"""How much tensors changed between two checkpoints."""

from math import inf, nan

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shardwise import checkpoint, cli
from shardwise.checkpoint import changes as module
from shardwise.checkpoint.changes import Change, changes
from shardwise.errors import CheckpointError


def between(folder, a, b, **options):
    torch.save(a, folder / "a.pt")
    torch.save(b, folder / "b.pt")
    return changes(checkpoint.open(folder / "a.pt"), checkpoint.open(folder / "b.pt"), **options)


def test_what_came_and_went_is_first_then_the_largest_relative_change(tmp_path):
    a = {
        "small": torch.full((8,), 100.0),
        "big": torch.ones(8),
        "same": torch.ones(3),
        "gone": torch.ones(2),
        "s": torch.ones(4),
    }
    b = {
        "small": torch.full((8,), 101.0),
        "big": torch.zeros(8),
        "same": torch.ones(3),
        "new": torch.ones(2),
        "s": torch.ones(2, 2),
    }
    found = between(tmp_path, a, b)
    assert [str(one) for one in found] == [
        "gone: removed",
        "new: added",
        "s: shape (4,) became (2, 2)",
        "big: 1 (100.0% of elements, by up to 1)",
        "small: 0.01 (100.0% of elements, by up to 1)",
    ]


def test_what_only_the_second_has_can_be_left_out_or_selected(tmp_path):
    a, b = {"m": {"w": torch.ones(2)}}, {"m": {"w": torch.zeros(2), "v": torch.ones(1)}, "adam": {"w": torch.ones(2)}}
    changed = "m.w: 1 (100.0% of elements, by up to 1)"
    for options in ({"exclude": ["adam.*"]}, {"select": "m.*"}):
        assert [str(one) for one in between(tmp_path, a, b, **options)] == ["m.v: added", changed]
    assert [one.name for one in between(tmp_path, a, b, select="m.*", rename={"m.*": "m.*"})] == ["m.w"]
    with pytest.raises(CheckpointError, match=r"exclude= has 'adm\.\*', which matches no name"):
        between(tmp_path, a, b, exclude=["adam.*", "adm.*"])


numbers = st.floats(-10, 10, width=32)


@given(arrays(np.float32, 37, elements=numbers), arrays(np.float32, 37, elements=numbers), st.integers(1, 64))
def test_changes_are_those_of_numpy_in_chunks_of_any_size(tmp_path_factory, a, b, chunk):
    folder, before = tmp_path_factory.mktemp("changes"), module.CHUNK
    module.CHUNK = 4 * chunk
    try:
        found = between(folder, {"w": torch.from_numpy(a)}, {"w": torch.from_numpy(b)})
    finally:
        module.CHUNK = before
    wide, other = a.astype(np.float64), b.astype(np.float64)
    if (a == b).all():
        assert found == []
        return
    norm = np.linalg.norm(wide)
    relative = np.linalg.norm(other - wide) / norm if norm else inf
    np.testing.assert_allclose(found[0].relative, relative, rtol=1e-9)
    np.testing.assert_allclose(found[0].largest, np.abs(other - wide).max(), rtol=1e-12)
    np.testing.assert_allclose(found[0].changed, (a != b).mean())


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, nan], [1.0, nan], []),
        ([1.0, inf], [1.0, inf], []),
        ([1.0, nan], [1.0, 2.0], [Change("w", "", inf, inf, 0.5)]),
        ([0.0, 0.0], [0.0, 2.0], [Change("w", "", inf, 2.0, 0.5)]),
        ([], [], []),
    ],
)
def test_values_that_are_no_numbers_are_compared_too(tmp_path, a, b, expected):
    assert between(tmp_path, {"w": torch.tensor(a)}, {"w": torch.tensor(b)}) == expected


def test_whole_numbers_are_compared_exactly(tmp_path):
    (found,) = between(tmp_path, {"w": torch.tensor([2**60, 1])}, {"w": torch.tensor([2**60 + 1, 1])})
    assert found.changed == 0.5


def test_another_dtype_with_equal_values_is_named(tmp_path):
    (found,) = between(tmp_path, {"w": torch.ones(4)}, {"w": torch.ones(4, dtype=torch.bfloat16)})
    assert str(found) == "w: torch.float32 became torch.bfloat16, with equal values"


def test_the_shell_prints_so_many_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save({f"m.{n}": torch.ones(2) for n in range(4)}, "a.pt")
    torch.save({f"{n}": torch.full((2,), 1.5) for n in range(4)}, "b.pt")
    monkeypatch.setattr(
        "sys.argv", ["shardwise", "diff", "a.pt", "b.pt", "--rename", "m.*=*", "--limit", "2", "--no-bar"]
    )
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert capsys.readouterr().out.splitlines() == [
        "0: 0.5 (100.0% of elements, by up to 0.5)",
        "1: 0.5 (100.0% of elements, by up to 0.5)",
        "... and 2 more tensors",
    ]
