"""resume: damaged steps are named and skipped, ranks agree, and what does not fit is an error."""

import logging
import os
import random
import shutil

import pytest
import torch
from checkpoints import emptied, names_in, split, training
from models import held, same
from test_run import empty_state, saved, sharded_state, state, warnings_of

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.step_folders import StepFolders
from shardwise.testing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own
FORMATS = ("safetensors", "dcp")
INDEXES = {"safetensors": "shardwise.json", "dcp": ".metadata"}


def file_of(path, step, format):
    """The file with the tensors of a step, and its index."""
    folder = path / f"step-{step:08d}"
    index = folder / INDEXES[format]
    files = [name for name in names_in(folder) if name not in (index.name, "shardwise.json")]
    return folder / next(name for name in files if not name.endswith(".sums.json")), index


def truncated(file, index):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def emptied_file(file, index):
    file.write_bytes(b"")


def removed(file, index):
    file.unlink()


def without_index(file, index):
    index.unlink()


def truncated_index(file, index):
    index.write_bytes(index.read_bytes()[: index.stat().st_size // 2])


def garbled_index(file, index):
    data = bytearray(index.read_bytes())
    data[0] ^= 0x10
    index.write_bytes(data)


def with_a_flipped_bit(file, index):
    """In the middle: a value of the tensor in both formats."""
    data = bytearray(file.read_bytes())
    data[-200 if file.suffix == ".distcp" else -5] ^= 0x10
    file.write_bytes(data)


def without_sums(file, index):
    file.with_name(f"{file.name}.sums.json").unlink()


DAMAGES = [truncated, emptied_file, removed, without_index, truncated_index, garbled_index]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("damage", [*DAMAGES, with_a_flipped_bit, without_sums])
def test_a_damaged_step_is_named_and_the_one_before_it_is_taken(tmp_path, caplog, format, damage):
    with checkpoint.Run(tmp_path) as run:
        saved(run, 1, 2, 3, format=format)
        damage(*file_of(tmp_path, 3, format))
        found = state(0)
        with warnings_of(caplog) as messages:
            assert run.resume(into=found) == 2
        assert found["step"] == 2
        same(found["w"], state(2)["w"])
        assert len(messages) == 1
        assert messages[0].startswith(f"{tmp_path}: step 3 is not whole: ")
        saved(run, 3, format=format)
        assert run.resume(into=found) == 3
        assert found["step"] == 3


def test_every_flipped_bit_of_an_index_is_noticed(tmp_path):
    draw = random.Random(0)
    with checkpoint.Run(tmp_path) as run:
        saved(run, 1, 2)
        _, index = file_of(tmp_path, 2, "safetensors")
        whole = index.read_bytes()
        for _ in range(60):
            data = bytearray(whole)
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            index.write_bytes(data)
            found = state(0)
            assert run.resume(into=found) == 1
            same(found["w"], state(1)["w"])


def test_resume_is_an_error_where_all_steps_are_damaged(tmp_path):
    with checkpoint.Run(tmp_path) as run:
        saved(run, 1, 2)
        for step in (1, 2):
            truncated(*file_of(tmp_path, step, "safetensors"))
        with pytest.raises(
            sw.CheckpointError, match=r"no step that is whole\. step 2 is not .*; step 1 is not whole: "
        ):
            run.resume(into=state(0))


def test_resume_is_an_error_where_the_only_step_was_lost(tmp_path):
    with checkpoint.Run(tmp_path) as run:
        saved(run, 1)
        shutil.rmtree(tmp_path / "step-00000001")
        with pytest.raises(sw.CheckpointError, match=r"step 1 is not whole: .*step-00000001 has no index"):
            run.resume(into=state(0))


def test_a_lost_step_that_is_older_than_a_whole_one_does_not_matter(tmp_path, caplog):
    with checkpoint.Run(tmp_path) as run:
        saved(run, 4)
        (tmp_path / "latest").write_text("step-00000003\n")
        assert run.resume(into=state(0)) == 4
        assert not caplog.records


@pytest.mark.parametrize(
    ("into", "text"),
    [
        ({"w": torch.zeros(6, 3)}, "w"),
        ({"w": torch.zeros(6, 2), "other": torch.zeros(2)}, "other"),
        ({"w": torch.zeros(6, 2), "absent": 3}, "absent"),
    ],
)
def test_a_state_that_does_not_fit_is_an_error_and_no_earlier_step_is_taken(tmp_path, caplog, into, text):
    with checkpoint.Run(tmp_path) as run:
        saved(run, 1, 2)
        with pytest.raises(sw.ShardwiseError, match=text):
            run.resume(into=into)
        assert not caplog.records


def test_a_damaged_step_that_is_asked_for_is_an_error(tmp_path):
    with checkpoint.Run(tmp_path) as run:
        saved(run, 1, 2)
        truncated(*file_of(tmp_path, 2, "safetensors"))
        with pytest.raises(sw.CheckpointError, match="step 2 is not whole"):
            run.resume(into=state(0), step=2)


def test_tensors_without_cells_and_scalars_do_not_count_as_damage(tmp_path):
    odd = {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0), "w": torch.ones(3)}
    with checkpoint.Run(tmp_path) as run:
        run.save(1, odd)
        run.save(2, odd)
        file, _ = file_of(tmp_path, 2, "safetensors")
        truncated(file, None)
        assert run.resume(into={name: torch.zeros_like(one) for name, one in odd.items()}) == 1
        with pytest.raises(sw.ShardwiseError, match="nothing"):
            run.resume(into={"nothing": torch.zeros(3)}, step=1)


def test_damaged_steps_are_not_listed_and_do_not_count_as_kept(tmp_path):
    with checkpoint.Run(tmp_path, keep=2) as run:
        saved(run, 1, 2)
        removed(*file_of(tmp_path, 2, "safetensors"))
        saved(run, 3)
        assert run.steps() == [1, 3]
        assert run.latest() == 3


def test_with_strict_false_a_damaged_step_is_an_error(tmp_path):
    """Some of it may be in the state by then, where an earlier step has nothing to replace it."""
    with checkpoint.Run(tmp_path) as run:
        saved(run, 1, 2)
        truncated(*file_of(tmp_path, 2, "safetensors"))
        with pytest.raises(sw.CheckpointError, match="truncated"):
            run.resume(into=state(0), strict=False)


# --- ranks ------------------------------------------------------------------------------------------------------------


class Messages(logging.Handler):
    """Warnings of this rank."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("shardwise").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def resumed(path, ranks, prepare=None, **options):
    """For every rank: the step, the value in the state, a cell of the tensor, and the warnings; or the error."""

    def work(rank):
        if prepare is not None:
            prepare(rank)
        messages, into = Messages(), empty_state(ranks)
        with checkpoint.Run(path) as run:
            try:
                step = run.resume(into=into, **options)
            except sw.ShardwiseError as error:
                return str(error)
        return step, into["step"], into["w"].local_tensor().flatten()[0].item(), messages.texts

    return on_ranks(ranks, work)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A run of four ranks with three steps."""
    path = tmp_path_factory.mktemp("four") / "run"

    def train(rank):
        with checkpoint.Run(path) as run:
            for step in (10, 20, 30):
                run.save(step, sharded_state(step, 4))

    on_ranks(4, train)
    return path


@pytest.mark.parametrize("read", ["each", "once"])
@pytest.mark.parametrize("number", range(4))
def test_a_file_that_only_some_ranks_read_is_noticed_by_all(four, tmp_path, number, read):
    path = shutil.copytree(four, tmp_path / "run")
    folder = path / "step-00000030"
    name = next(name for name in names_in(folder) if name.startswith(f"shard-0000{number}"))
    truncated(folder / name, None)
    (step, value, _, messages), (other, _, _, silent) = resumed(path, 2, read=read)
    assert (step, value, other) == (20, 20, 20)
    assert name in messages[0]
    assert not silent, "one rank tells"


def test_ranks_take_the_newest_step_that_all_of_them_see(four, tmp_path):
    path = shutil.copytree(four, tmp_path / "run")

    def lag(rank):
        see = StepFolders.index_bytes
        if rank == 1:  # its file system does not show the newest step yet
            StepFolders.index_bytes = lambda self, step: None if step == 30 else see(self, step)

    (step, value, _, messages), (other, *_) = resumed(path, 2, lag)
    assert (step, value, other) == (20, 20, 20)
    assert messages == [f"{path}: step 30 is not whole: rank 1 does not see it"]


def test_ranks_with_disks_of_their_own_take_the_newest_step_that_is_the_same_on_all(four, tmp_path):
    """Copies of the run on every host; on one of them step 20 is of another training, and step 30 did not arrive."""
    for rank in range(2):
        shutil.copytree(four, tmp_path / str(rank) / "run")
    shutil.rmtree(tmp_path / "1" / "run" / "step-00000030")
    shutil.rmtree(tmp_path / "1" / "run" / "step-00000020")

    def another(rank):
        with checkpoint.Run(tmp_path / "other") as run:
            run.save(20, sharded_state(77, 4))

    on_ranks(4, another)
    shutil.copytree(tmp_path / "other" / "step-00000020", tmp_path / "1" / "run" / "step-00000020")
    (step, value, _, messages), (other, *_) = resumed("run", 2, lambda rank: os.chdir(tmp_path / str(rank)))
    assert (step, value, other) == (10, 10, 10)
    assert messages == [
        "run: step 30 is not whole: rank 1 does not see it",
        "run: step 20 is not whole: ranks 0 and 1 see others",
    ]


def test_an_error_of_resume_is_the_same_on_all_ranks(four, tmp_path):
    path = shutil.copytree(four, tmp_path / "run")

    def work(rank):
        into = {"w": held(torch.zeros(8, 5), "8x5/S0@2")}
        with checkpoint.Run(path) as run, pytest.raises(sw.ShardwiseError) as error:
            run.resume(into=into)
        return str(error.value)

    one, other = on_ranks(2, work)
    assert one == other
    assert "(8, 5)" in one


def test_a_model_and_its_optimizer_resume_on_another_number_of_ranks(tmp_path):
    def train(rank):
        made = training("fsdp", range(4))
        with checkpoint.Run(tmp_path) as run:
            run.save(7, made)
        tensors, _ = split(made)
        return tensors if rank == 0 else None

    def resume(rank):
        into = emptied(training("fsdp", range(2)))
        with checkpoint.Run(tmp_path) as run:
            step = run.resume(into=into)
        tensors, values = split(into)
        return step, tensors, values["step"]

    trained = on_ranks(4, train)[0]
    for step, tensors, value in on_ranks(2, resume):
        assert (step, value) == (7, 7)
        assert tensors.keys() == trained.keys()
        for name, tensor in tensors.items():
            same(tensor, trained[name])


def test_a_module_is_resumed_in_place(tmp_path):
    model = torch.nn.Linear(3, 2)
    with checkpoint.Run(tmp_path) as run:
        run.save(1, model.state_dict())
        into = torch.nn.Linear(3, 2)
        assert run.resume(into=into) == 1
    same(into.weight.detach(), model.weight.detach())
