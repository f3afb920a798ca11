"""random_state: every rank draws on from where it was; on another number of ranks only if that is asked for."""

import random

import numpy as np
import pytest
import torch
from test_run import state

import shardwise as sw
from shardwise import checkpoint
from shardwise.testing import on_ranks

FORMATS = ("safetensors", "dcp")


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draw():
    """Numbers of all generators; gauss and randn keep a second one for the next call."""
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]
    return [*numbers, torch.randn(1, dtype=torch.float64).item()]


def made():
    return {"w": torch.ones(3), "deep": [{"random": checkpoint.random_state()}], "step": 1}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("group", [False, True])
def test_every_rank_draws_what_it_would_have_drawn(tmp_path, format, group):
    def work(rank):
        seed(rank)
        draw()
        saved = made()
        draw()  # the states are those at the save
        checkpoint.save(saved, tmp_path / "saved", format=format)
        expected = [draw(), draw()]
        seed(100)
        import torch.distributed as dist

        checkpoint.load(tmp_path / "saved", into=made(), group=dist.group.WORLD if group else None)
        return expected, [draw(), draw()]

    outcomes = on_ranks(3, work)
    for expected, found in outcomes:
        assert expected == found
    assert len({str(expected) for expected, _ in outcomes}) == 3


def test_one_process_draws_on_and_the_state_dict_keeps_its_leaf(tmp_path):
    seed(3)
    into = made()
    checkpoint.save(into, tmp_path)
    expected = draw()
    checkpoint.load(tmp_path, into=into)
    assert draw() == expected
    assert repr(into["deep"][0]["random"]) == "random_state(rng='each')"


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A checkpoint of three ranks, and what each would have drawn next."""
    path = tmp_path_factory.mktemp("three") / "saved"

    def work(rank):
        seed(rank)
        checkpoint.save(made(), path)
        return draw()

    return path, on_ranks(3, work)


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_number_of_ranks_is_refused_and_nothing_is_loaded(three, ranks):
    path, _ = three

    def work(rank):
        seed(7)
        into = {**made(), "w": torch.zeros(3)}
        with pytest.raises(sw.CheckpointError) as error:
            checkpoint.load(path, into=into)
        seed(7)
        return str(error.value), into["w"].sum().item(), draw()

    outcomes = on_ranks(ranks, work)
    seed(7)
    expected = draw()
    for text, total, found in outcomes:
        assert f"has the random states of 3 ranks, but {ranks} load it: random_state(rng='first') gives all" in text
        assert (total, found) == (0, expected)


def test_with_first_all_ranks_draw_what_the_first_one_would_have_drawn(three):
    path, expected = three

    def work(rank):
        into = {"deep": [{"random": checkpoint.random_state(rng="first")}]}
        checkpoint.load(path, into=into)
        return draw()

    assert on_ranks(2, work) == [expected[0]] * 2


def test_a_run_restores_the_generators_of_all_ranks(tmp_path):
    def work(rank):
        seed(rank)
        with checkpoint.Run(tmp_path) as run:
            run.save(1, made())
            expected = draw()
            assert run.resume(into=made()) == 1
            return expected == draw()

    assert on_ranks(2, work) == [True, True]


def test_a_run_on_another_number_of_ranks_is_an_error_and_no_earlier_step_is_taken(tmp_path):
    def train(rank):
        with checkpoint.Run(tmp_path) as run:
            for step in (1, 2):
                run.save(step, made())

    def resume(rank):
        with checkpoint.Run(tmp_path) as run:
            with pytest.raises(sw.CheckpointError) as error:
                run.resume(into=made())
            into = {**made(), "deep": [{"random": checkpoint.random_state(rng="first")}]}
            return str(error.value), run.resume(into=into)

    on_ranks(3, train)
    (text, step), other = on_ranks(2, resume)
    assert (text, step) == other
    assert "random states of 3 ranks, but 2 load it" in text
    assert step == 2


def test_saves_under_other_names_keep_random_states(tmp_path):
    seed(5)
    checkpoint.save(made(), tmp_path, rename={"w": "v"}, remap=[sw.checkpoint.Transposed("v", (0,))])
    expected = draw()
    checkpoint.load(tmp_path, into={"v": torch.zeros(3), "deep": [{"random": checkpoint.random_state()}]})
    assert draw() == expected


def test_a_checkpoint_without_random_states_is_refused_unless_strict_is_false(tmp_path):
    checkpoint.save(state(1), tmp_path)
    with pytest.raises(sw.CheckpointError, match=r"has no random state 'deep\.0\.random'.*strict=False keeps"):
        checkpoint.load(tmp_path, into=made())
    seed(4)
    checkpoint.load(tmp_path, into={"w": torch.zeros(6, 2), "random": checkpoint.random_state()}, strict=False)
    found = draw()
    seed(4)
    assert found == draw()


def test_a_tensor_that_is_no_random_state_is_refused(tmp_path):
    checkpoint.save({"random": torch.zeros(2, 3)}, tmp_path)
    with pytest.raises(sw.CheckpointError, match=r"'random' in .* is not a random state: its shape is \(2, 3\)"):
        checkpoint.load(tmp_path, into={"random": checkpoint.random_state()})


def test_a_damaged_random_state_is_refused(tmp_path):
    checkpoint.save({"random": checkpoint.random_state()}, tmp_path)
    file = next(tmp_path.glob("shard-*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"python"', b'"pyth\x00n"'))
    with pytest.raises(sw.CheckpointError, match=r"'random' in .* is damaged: row 0 is not JSON"):
        checkpoint.load(tmp_path, into={"random": checkpoint.random_state()})
    file.write_bytes(data.replace(b"MT19937", b"MT19938"))
    with pytest.raises(sw.CheckpointError, match="the saved state of the random generator 'numpy' does not fit"):
        checkpoint.load(tmp_path, into={"random": checkpoint.random_state()})


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="rng= must be 'each' or 'first', not 'last'"):
        checkpoint.random_state(rng="last")
