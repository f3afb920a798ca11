"""Saves of states that are equal to earlier ones, but for values: what those found out is used again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from shardwise import ShardedTensor, checkpoint
from shardwise.checkpoint import known_states, state_descriptions
from shardwise.checkpoint.known_states import KnownStates
from shardwise.errors import ExchangeError
from shardwise.job.agree import Callers

FORMATS = ("safetensors", "dcp")


def _state(step: int, layout: str = "6x4/S0@2") -> dict[str, Any]:
    """Every value of it says of which step it is."""
    rank = dist.get_rank()
    shape = (3, 4) if "S0" in layout else (6, 2)
    sharded = ShardedTensor(torch.full(shape, float(10 * step + rank)), layout)
    plain = torch.full((5,), float(step), dtype=torch.bfloat16)
    return {"w": sharded, "plain": plain, "tied": plain, "nested": {"step": step, 0: torch.tensor(step)}}


def _read(path: Path) -> dict[str, Any]:
    there = checkpoint.open(path)
    values = {name: one for name, one in there.objects.items() if name.endswith("step")}
    return {name: there[name].read().tolist() for name in sorted(there)} | values


def _told(work: Callable[[], object]) -> list[bool]:
    """For each time that ranks describe a state in `work`: is it an earlier one?"""
    known, made = list[bool](), state_descriptions._together

    def together(*args: Any) -> Any:
        known[-1] = False
        return made(*args)

    with pytest.MonkeyPatch.context() as patched:
        found = KnownStates.find
        patched.setattr(KnownStates, "find", lambda *args: (known.append(True), found(*args))[1])
        patched.setattr(state_descriptions, "_together", together)
        work()
    return known


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("async_op", [False, True])
def test_later_saves_of_an_equal_state_write_what_a_first_one_writes(
    tmp_path: Path, format: str, async_op: bool
) -> None:
    def work(rank: int) -> tuple[list[bool], list[dict[str, Any]], list[dict[str, Any]]]:
        def save(step: int, group: object) -> None:
            handle = checkpoint.save(
                _state(step), tmp_path / f"{group}{step}", format=format, group=groups[group], async_op=async_op
            )
            if handle is not None:
                handle.wait()

        groups = {"known": dist.new_group(backend="gloo"), **{n: dist.new_group(backend="gloo") for n in range(3)}}
        known = _told(lambda: [save(step, "known") for step in (0, 1, 1000)])
        for at, step in enumerate((0, 1, 1000)):
            save(step, at)
        dist.barrier()
        ours, first = (
            [_read(tmp_path / f"{g}{s}") for g, s in pairs]
            for pairs in ([("known", 0), ("known", 1), ("known", 1000)], [(0, 0), (1, 1), (2, 1000)])
        )
        return known, ours, first

    for known, ours, first in on_ranks(2, work):
        assert known == [False, True, True]
        assert ours == first
        assert ours[2]["nested.step"] == 1000


@pytest.mark.parametrize("format", FORMATS)
def test_states_take_turns_and_only_the_last_few_are_known(tmp_path: Path, format: str) -> None:
    def work(rank: int) -> list[bool]:
        def save(number: int, layout: str) -> None:
            checkpoint.save(_state(number, layout), tmp_path / str(number), format=format)
            dist.barrier()
            assert _read(tmp_path / str(number))["nested.step"] == number
            assert checkpoint.open(tmp_path / str(number))["w"].read()[5, 3] == 10 * number + 1

        def all_of_them() -> None:
            for number, layout in enumerate(["6x4/S0@2", "6x4/S1@2", "6x4/S0@2", "6x4/S1@2"]):
                save(number, layout)
            for number in range(known_states.MOST):
                checkpoint.save({f"other {number}": torch.ones(2)}, tmp_path / "other", format=format)
            save(4, "6x4/S0@2")

        return _told(all_of_them)

    assert on_ranks(2, work) == [[False, False, True, True, *[False] * known_states.MOST, False]] * 2


def test_a_rank_that_knows_the_state_describes_it_to_one_that_does_not(tmp_path: Path) -> None:
    def work(rank: int) -> dict[str, Any]:
        checkpoint.save(_state(0), tmp_path / "0")
        if rank == 1:
            KnownStates.of(Callers("save", None)).__init__()
        checkpoint.save(_state(1), tmp_path / "1")
        checkpoint.save(_state(2), tmp_path / "2")
        dist.barrier()
        return _read(tmp_path / "2")

    for read in on_ranks(2, work):
        assert read["w"][5] == [21.0] * 4
        assert read["nested.step"] == 2


def test_replicas_that_begin_to_differ_are_noticed_in_a_known_state(tmp_path: Path) -> None:
    def work(rank: int) -> tuple[int, list[float], list[float]]:
        state = {"a": torch.zeros(4), "b": torch.zeros(4)}
        checkpoint.save(state, tmp_path / "0")
        state["b"] += rank
        with pytest.warns(UserWarning, match="'b' differs") if rank == 0 else pytest.MonkeyPatch.context():
            checkpoint.save(state, tmp_path / "1")
        state["b"].fill_(7)
        checkpoint.save(state, tmp_path / "2")
        dist.barrier()
        return rank, _read(tmp_path / "1")["b"], _read(tmp_path / "2")["b"]

    assert on_ranks(2, work) == [(rank, [0.0] * 4, [7.0] * 4) for rank in range(2)]


def test_memory_of_a_known_state_that_moved_or_was_given_back_is_not_read(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0).view(2, 3)}
    checkpoint.save(state, tmp_path / "0")
    state["w"] = torch.arange(6.0).view(3, 2).T + 1  # another memory, other strides
    checkpoint.save(state, tmp_path / "1")
    torch.testing.assert_close(checkpoint.open(tmp_path / "1")["w"].read(), state["w"])
    state["w"].untyped_storage().resize_(0)
    with pytest.raises(ExchangeError, match="was given back"):
        checkpoint.save(state, tmp_path / "2")


def test_a_key_that_becomes_a_place_in_a_list_makes_another_state(tmp_path: Path) -> None:
    checkpoint.save({"a": {0: torch.ones(2)}}, tmp_path / "dict")
    checkpoint.save({"a": [torch.ones(2)]}, tmp_path / "list")
    target: dict[str, Any] = {"a": [torch.zeros(2)]}
    checkpoint.load(tmp_path / "list", target)
    assert type(checkpoint.open(tmp_path / "list").paths["a.0"][1]) is int
    assert type(checkpoint.open(tmp_path / "dict").paths["a.0"][1]) is not int
