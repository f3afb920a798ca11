"""What a state dict keeps when it is resharded, and the memory that it gives back."""

import time
import weakref

import pytest
import torch
from models import dtensor, held, lies, meshes, numbers, same
from ranks import ranks  # noqa: F401
from torch.distributed.tensor import DTensor, Shard

import shardwise as sw
from shardwise.job.session import group_transport

WHOLE = numbers(8, 6)
MOVED = [("kept*", None), ("*", "8x6/S1@4")]


def test_values_that_only_one_rank_has_stay_there(ranks):  # noqa: F811
    def run(rank):
        given = {"w": held(WHOLE, "8x6/S0@4"), "seed": rank, "own": {f"of {rank}": rank}}
        found = sw.reshard_state_dict(given, {"w": "8x6/S1@4"})
        lies(found["w"], WHOLE, "8x6/S1@4")
        assert (found["seed"], found["own"]) == (rank, {f"of {rank}": rank})

    ranks(4, run)


def test_none_is_a_value_like_others_where_all_ranks_have_it(ranks):  # noqa: F811
    def run(rank):
        given = {"w": held(WHOLE, "8x6/S0@4"), "groups": [{"foreach": None, "lr": 0.1}], "none": None}
        for to in {"w": "8x6/S1@4"}, [("*", "8x6/S1@4")], lambda name: "8x6/S1@4", {"w": given["w"]}:
            found = sw.reshard_state_dict(given, to)
            assert {**found, "w": 0} == {**given, "w": 0}
        other = {"w": held(WHOLE * 0, "8x6/S1@4"), "none": None}
        sw.Resharder(given, other).run()
        lies(other["w"], WHOLE, "8x6/S1@4")

    ranks(4, run)


@pytest.mark.devices
def test_a_rank_that_has_an_empty_container_of_a_tensor_takes_part(ranks):  # noqa: F811
    def run(rank):
        two = sw.Layout.chunk((8, 6), 0, [0, 1])
        given = {"w": held(WHOLE, two) if rank < 2 else sw.ShardedTensor([], two)}
        lies(sw.reshard_state_dict(given, {"w": "8x6/S1@4"})["w"], WHOLE, "8x6/S1@4")
        room = {"w": held(WHOLE * 0, "8x6/S1@4")}
        sw.Resharder(given, room).run()
        lies(room["w"], WHOLE, "8x6/S1@4")

    ranks(4, run)


# --- release_staging -------------------------------------------------------------------------------------------------


def test_what_a_resharder_remembers_of_messages_does_not_keep_their_memory(ranks):  # noqa: F811
    whole = numbers(512, 256)

    def run(rank):
        given, room = {"w": held(whole, "512x256/S0@2")}, {"w": held(whole * 0, "512x256/S1@2")}
        sync = sw.Resharder(given, room, transport="group")
        sync.run()
        (buffer,) = group_transport(None).staging._buffers.values()
        memory = weakref.ref(buffer.untyped_storage())
        del buffer
        assert memory() is not None
        assert sw.release_staging() > 0
        end = time.monotonic() + 5
        while memory() is not None and time.monotonic() < end:  # a thread of gloo holds it a moment longer
            time.sleep(0.01)
        assert memory() is None
        room["w"].local_tensor().zero_()
        sync.run()
        lies(room["w"], whole, "512x256/S1@2")

    ranks(2, run)


# --- free=True -------------------------------------------------------------------------------------------------------


def bytes_of(value):
    """How much memory this rank has of a tensor."""
    local = [value._local_tensor] if isinstance(value, DTensor) else getattr(value, "shards", [value])
    return sum(tensor.untyped_storage().nbytes() for tensor in local)


def test_the_memory_of_what_was_sent_is_given_back(ranks):  # noqa: F811
    def run(rank):
        row, _ = meshes()
        blocks = [(r, (2 * r, 3 * j), (2 * r + 2, 3 * j + 3)) for r in range(4) for j in (0, 1)]
        for options in {}, {"max_bytes": 100}, {"verify": True, "max_bytes": 100}:
            given = {
                "d": dtensor(WHOLE.clone(), row, Shard(0)),
                "o": held(WHOLE, "8x6/S0@4"),
                "p": WHOLE.clone(),
                "c": held(WHOLE, sw.Layout.boxes((8, 6), blocks)),
                "kept": held(WHOLE, "8x6/S0@4"),
            }
            found = sw.reshard_state_dict(given, MOVED, free=True, **options)
            left = {name: bytes_of(value) for name, value in given.items()}
            assert left == {**dict.fromkeys("dopc", 0), "kept": 48}
            assert found["kept"] is given["kept"]
            lies(given["kept"], WHOLE, "8x6/S0@4")
            for name in "dopc":
                lies(found[name], WHOLE, "8x6/S1@4")

    ranks(4, run)


def test_memory_is_given_back_while_others_are_still_on_their_way(ranks):  # noqa: F811
    def run(rank):
        given = {f"w{at}": held(WHOLE + at, "8x6/S0@4") for at in range(8)}
        left = []
        rules = [("*", "8x6/S1@4")]
        sw.reshard_state_dict(
            given,
            rules,
            free=True,
            max_bytes=200,
            progress=lambda done, total: left.append(sum(map(bytes_of, given.values()))),
        )
        assert left[0] > left[len(left) // 2] > left[-1]
        assert left == sorted(left, reverse=True)
        assert left[-1] <= 2 * 48

    ranks(4, run)


def test_tensors_that_share_memory_all_arrive_before_it_is_given_back(ranks):  # noqa: F811
    def run(rank):
        for options in {}, {"max_bytes": 100}, {"verify": True, "max_bytes": 100}:
            tied = held(WHOLE, "8x6/S0@4")
            other = sw.ShardedTensor([tied.shards[0].view(2, 6)], "8x6/S0@4")
            buffer = torch.cat([WHOLE.chunk(4)[rank] + at for at in range(3)])  # one allocation, as FSDP1 has
            views = {f"v{at}": sw.ShardedTensor(buffer[2 * at : 2 * at + 2], "8x6/S0@4") for at in range(3)}
            given = {"embed": tied, **views, "head": other, "again": tied}
            found = sw.reshard_state_dict(given, MOVED, free=True, **options)
            for name in "embed", "head", "again":
                lies(found[name], WHOLE, "8x6/S1@4")
            for at in range(3):
                lies(found[f"v{at}"], WHOLE + at, "8x6/S1@4")
            assert {bytes_of(value) for value in given.values()} == {0}

    ranks(4, run)


def test_memory_that_belongs_to_somebody_else_stays(ranks):  # noqa: F811
    """Arrays of numpy and mapped files cannot be resized: they are let go of, and that is all."""

    def run(rank):
        array = WHOLE.chunk(4)[rank].numpy().copy()
        given = {"a": sw.ShardedTensor(torch.from_numpy(array), "8x6/S0@4"), "b": held(WHOLE, "8x6/S0@4")}
        found = sw.reshard_state_dict(given, MOVED, free=True, max_bytes=100)
        for name in "ab":
            lies(found[name], WHOLE, "8x6/S1@4")
        same(torch.from_numpy(array), WHOLE.chunk(4)[rank])

    ranks(4, run)


def test_memory_that_was_moved_or_saved_can_still_be_resized(ranks, tmp_path):  # noqa: F811
    def run(rank):
        given, room = held(WHOLE, "8x6/S0@4"), held(WHOLE * 0, "8x6/S1@4")
        step = torch.tensor(3.0)
        sw.reshard(given, "8x6/S1@4")
        sw.Resharder({"w": given}, {"w": room}).run()
        sw.checkpoint.save({"w": given, "step": step}, tmp_path / "saved")
        lies(room, WHOLE, "8x6/S1@4")
        return [t.untyped_storage().resizable() for t in (*given.shards, *room.shards, step)]

    assert ranks(4, run) == [[True, True, True]] * 4
