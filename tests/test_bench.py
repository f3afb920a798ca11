"""The short benchmark: its figures are complete and consistent. Speed is not tested."""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import shardwise as sw
from shardwise.bench import bench, short, table
from shardwise.bench.clock import Interval, Task, every_repeat, interleaved, together
from shardwise.bench.limit import strided_copies
from shardwise.bench.moves import GROUP, OUT, PLAIN, SHARED, Way, check, redistributed, rows_to_columns, silence
from shardwise.bench.short import check_options, memory_needed
from shardwise.cli import app
from shardwise.testing import RankError, hosts, on_ranks, why_no_hosts

SMALL = 2**14


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch):
    monkeypatch.setattr(short, "MOST", short.FEWEST)


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


def test_the_figures_are_in_the_table_and_for_tools():
    moves = list(bench(2, SMALL))
    assert [move.move for move in moves] == ["rows -> columns", "S0 -> R"]
    assert [(move.bytes_moved, move.lower_bound) for move in moves] == [(SMALL // 2, SMALL // 2), (SMALL, SMALL)]
    for move in moves:
        figures = move.to_json()
        assert min(figures[way] for way in ("ours", "shared", "group", "redistribute", "limit")) > 0
        assert figures["ratio"] == min(filter(None, (move.sharded_tensor, move.redistribute))) / move.ours
        assert figures["of_the_limit"] == move.limit / move.ours
    assert moves[1].sharded_tensor is None  # which cannot replicate
    assert [column.header for column in table(moves).columns] == ["", "rows -> columns", "S0 -> R"]


def test_four_ranks_move_on_a_square_too_and_the_command_says_all_of_it_as_json():
    said = invoke("--ranks", "4", "--size", "16KiB", "--json")
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert (found["ranks"], found["size"]) == (4, SMALL)
    assert found["machine"].keys() == {"cores", "system", "python", "numpy", "torch"}
    assert [move["move"] for move in found["moves"]] == ["rows -> columns", "S0 -> R", "[S0, S1] -> [S1, S0]"]
    assert [move["bytes_moved"] for move in found["moves"]] == [3 * SMALL // 4, 3 * SMALL, SMALL // 2]


def test_the_command_prints_a_table_with_its_legend():
    said = invoke("--ranks", "2", "--size", "16KiB")
    assert said.exit_code == 0, said.output
    for text in ("over the group", "torch redistribute", "of the limit", "8.00 KiB", "on 2 processes of this machine"):
        assert text in said.stdout


@pytest.mark.parametrize(
    ("ranks", "size", "why"),
    [
        (1, 2**20, "from 2 to"),
        (100_000, 2**20, "cores"),
        (4, 63, "at least 64 bytes"),
        (4, 2**60, "ask for less, or for fewer ranks"),
    ],
)
def test_what_this_machine_cannot_do_is_refused(ranks, size, why):
    with pytest.raises(ValueError, match=why):
        check_options(ranks, size)


def test_moves_are_measured_on_a_device_too():
    (move, *_) = bench(2, SMALL, "far")
    assert min(move.ours, move.group, move.redistribute, move.limit) > 0
    assert move.shared is None


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_the_command_says_once_that_there_is_no_gpu():
    said = invoke("--device", "cuda")
    assert str(said.exception).startswith("--device cuda: torch finds no GPU on this machine")
    with pytest.raises(ValueError, match="--device tpu: cpu or cuda"):
        check_options(2, SMALL, "tpu")


def test_a_size_that_is_none_is_refused_by_the_command():
    assert "is not a size" in str(invoke("--size", "large").exception)


def test_more_ranks_need_more_memory():
    assert memory_needed(2, SMALL) < memory_needed(4, SMALL) < memory_needed(4, 2 * SMALL)


def test_all_ways_to_move_lead_to_the_same():
    def work(_):
        silence()
        variants = (PLAIN, OUT, SHARED, GROUP)
        for sides in (
            rows_to_columns((12, 20), variants),
            redistributed(["S0"], ["R"], (12, 20), variants),
            redistributed(["S0", "S1"], ["S1", "S0"], (12, 20), variants),
        ):
            check(sides)
        return sorted(sides.ours)

    assert on_ranks(4, work) == [["", "out=", "over the group, out=", "source shared, out="]] * 4


def test_a_way_that_leads_elsewhere_is_found():
    def work(_):
        sides = redistributed(["S0"], ["S1"], (4, 8), [OUT])
        check(sides._replace(ours={"wrong": Way(lambda _: sides.out)}))  # which nobody writes into

    with pytest.raises(RankError, match="wrong finds"):
        on_ranks(2, work)


@pytest.mark.parametrize("goal", ["9x10/S1@3", "9x10/R@3", "9x10/S0@2"])
def test_the_limit_writes_every_cell_of_the_target(goal):
    plan = sw.plan(sw.parse("9x10/S0@3"), sw.parse(goal))
    for rank in plan.target.owners():
        target = [torch.zeros(plan.target.local_shape(rank))]
        strided_copies(rank, [(plan, torch.float32, target)])()
        torch.testing.assert_close(target[0], torch.ones_like(target[0]), rtol=0, atol=0)


def test_the_limit_copies_nothing_for_a_rank_without_a_part_and_is_none_for_sums():
    plan = sw.plan(sw.parse("8x8/S0@4"), sw.parse("8x8/S0@2"))
    assert strided_copies(3, [(plan, torch.float32, None)])() is None
    assert strided_copies(0, [(sw.plan(sw.parse("8x8/P@2"), sw.parse("8x8/S0@2")), torch.float32, None)]) is None


def test_jobs_take_turns_with_what_was_prepared_for_them():
    said = []
    jobs = [Task(said.append, lambda name=name: name, repeats) for name, repeats in (("a", 4), ("b", 2))]
    spans, _ = every_repeat(*jobs)
    assert said == ["a", "b", "a", "a", "b", "a"]
    assert [len(found) for found in spans] == [4, 2]
    assert all(start <= end for found in spans for start, end in found)
    (timed,) = interleaved(Task(lambda given: given + 1, lambda: 1, calls=3))
    assert timed.result == 2


def test_ranks_that_take_turns_take_as_long_as_all_of_them():
    assert together([[Interval(0.0, 1.0)], [Interval(1.0, 2.0)], [Interval(2.0, 3.0)]]) == 3.0


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (Path(__file__).parents[1] / "benchmarks").glob("[!_]*.py"))
)
def test_all_benchmarks_can_be_imported(name, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    import_module(f"benchmarks.{name}")


@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
def test_a_plain_socket_moves_all_bytes_over_the_link(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    link, size = import_module("benchmarks.link"), 10**7
    with hosts(2) as (a, b):

        def work(_):
            move = link.plain_socket(size, 0, 2, b.address)
            return [link.bytes_on_the_link(a, move) for _ in range(2)]

        for crossed in on_ranks(3, work, hosts=[a, a, b]):
            assert all(size <= count <= 1.25 * size for count in crossed)  # some packets may be sent twice
