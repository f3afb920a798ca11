"""Without other processes: snapshots, jobs whose sources are mapped, what is told as JSON, signed entries."""

import json

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.errors import RefusedValueError
from shardwise.job.mapped import MappedJob
from shardwise.job.plan import ModelPlan, TensorInfo
from shardwise.job.remap import links
from shardwise.job.snapshot import MemorySpec, Snapshot, cut_up
from shardwise.layout import local_shapes
from shardwise.publishing.catalog import Subscription, infos_from_json, infos_to_json, relabelled
from shardwise.publishing.meeting import Address
from shardwise.publishing.sealing import Seal, secret_of
from shardwise.publishing.versions import HeldVersions
from shardwise.testing import gather, scatter, strategies

CPU = torch.device("cpu")


def memory_of(layout, owner, dtype):
    return Snapshot({"w": [MemorySpec(shape, dtype, CPU) for shape in local_shapes(layout, owner)]})


@given(strategies.pairs(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=60)
def test_every_owner_copies_its_cells_out_of_the_mapped_memory_of_all_others(pair, dtype):
    source, target = pair
    assume(source.op is None and target.op is None)
    owners = list(source.owners())
    target = target.relabel({owner: 1000 + owner for owner in target.owners()})
    whole = np.arange(np.prod(source.shape, dtype=int), dtype=np.float32).reshape(source.shape) % 251
    infos = TensorInfo(source.shape, torch.float32, source, "cpu"), TensorInfo(target.shape, dtype, target, "cpu")
    plan = ModelPlan.of(links({"w": source.shape}, {"w": target.shape}), {"w": infos[0]}, {"w": infos[1]})
    shards = scatter(whole, source)
    mapped = {owner: [torch.from_numpy(np.array(one)) for one in shards[owner]] for owner in owners}
    found = dict[int, list[np.ndarray]]()
    for owner in target.owners():
        room = memory_of(target, owner, dtype)
        MappedJob(plan, owner, room).run(lambda peer, _: mapped[peer])
        found[owner] = [one.float().numpy() for one in room.memory("w")]
    np.testing.assert_array_equal(gather(found, target), whole, strict=True)


@pytest.mark.parametrize("pair", [("4/P@2", "4/R@2:2,3"), ("4/R@2", "4/P@2:2,3")])
def test_partial_sums_are_not_copied_out_of_mapped_memory(pair):
    both = [{"w": TensorInfo((4,), torch.float32, sw.parse(text), "cpu")} for text in pair]
    plan = ModelPlan.of(links({"w": (4,)}, {"w": (4,)}), *both)
    with pytest.raises(ValueError, match="partial sums"):
        MappedJob(plan, 2, Snapshot({}))


def test_a_snapshot_lies_in_one_segment_and_others_find_its_tensors_there():
    values = {"a": [torch.arange(5)], "b": [torch.randn(3, 4), torch.zeros(0, 2)], "c": [torch.tensor(True)]}
    snapshot = Snapshot(values)
    snapshot.take(values)
    specs = {name: list(map(MemorySpec.of, tensors)) for name, tensors in values.items()}
    other = cut_up(snapshot.segment.mapped(), specs)
    for name, tensors in values.items():
        for theirs, wanted in zip(other[name], tensors, strict=True):
            torch.testing.assert_close(theirs, wanted, rtol=0, atol=0)
    values["a"][0].zero_()
    torch.testing.assert_close(other["a"][0], torch.arange(5), rtol=0, atol=0)


def test_memory_of_a_version_is_used_again_once_nobody_reads_it():
    held, values = HeldVersions(), {"w": [torch.ones(4)]}
    first = held.new_memory(values)
    held.finish(held.begin(1, first))
    with held.reading(1, 1.0) as side:
        held.drop(1)
        assert side is first
        assert held.new_memory(values) is not first
    assert held.new_memory(values) is first


def test_memory_that_another_process_may_still_read_is_never_used_again():
    held, values = HeldVersions(), {"w": [torch.ones(4)]}
    first = held.new_memory(values)
    held.finish(held.begin(1, first))
    held.hold([2], 2, [1])
    assert 1 not in held
    assert held.new_memory(values) is not first


@given(st.data())
@settings(max_examples=40)
def test_subscriptions_survive_json(data):
    source, target = data.draw(strategies.pairs())
    assume(source.op in (None, "sum") and target.op in (None, "sum"))
    infos = [{"x.w": TensorInfo(one.shape, torch.bfloat16, one, "cpu")} for one in (source, target)]
    infos = [relabelled(one, list(layout.owners())) for one, layout in zip(infos, (source, target), strict=True)]
    assert infos_from_json(json.loads(json.dumps(infos_to_json(infos[0])))) == infos[0]
    subscription = Subscription(infos[1], tuple(links({"x.w": source.shape}, {"x.w": target.shape})))
    again = Subscription.from_json(json.loads(json.dumps(subscription.to_json())))
    assert (again.targets, again.links, again.digest) == (subscription.targets, subscription.links, subscription.digest)
    rows = len(source.owners())
    assert again.plan(infos[0], rows, None).fingerprint == subscription.plan(infos[0], rows, None).fingerprint


def test_views_of_rules_survive_json():
    sources = {"q": (8, 6), "k": (4, 6), "v": (4, 6)}
    made = links(sources, {"qkv": (16, 6)}, remap=[sw.Interleaved("qkv", ["q", "k", "v"], sizes=[2, 1, 1])])
    info = TensorInfo((16, 6), torch.float32, sw.parse("16x6/S0@2"), "cpu")
    subscription = Subscription({"qkv": info}, tuple(made))
    assert Subscription.from_json(json.loads(json.dumps(subscription.to_json()))).links == subscription.links


def test_entries_that_were_signed_with_another_secret_or_for_another_place_are_not_opened():
    entry = Seal(b"secret").close("here", {"a": 1})
    assert Seal(b"secret").open("here", entry) == {"a": 1}
    assert Seal(b"other").open("here", entry) is None
    assert Seal(b"secret").open("there", entry) is None
    assert Seal(b"secret").open("here", entry[:-1] + b"]") is None
    assert Seal(b"secret").open("here", b"") is None


def test_a_secret_is_a_text_or_a_file(tmp_path):
    file = tmp_path / "key"
    file.write_text("secret\n")
    assert secret_of("secret") == secret_of(b"secret") == secret_of(file) == b"secret"
    with pytest.raises(RefusedValueError, match="cannot be read"):
        secret_of(tmp_path / "none")
    with pytest.raises(RefusedValueError, match="empty"):
        secret_of("")


def test_meeting_points_are_addresses_or_files(tmp_path):
    assert Address.of("node7:29600") == Address("node7", 29600)
    assert Address.of("[::1]:29600") == Address("::1", 29600)
    assert Address.of(f"file://{tmp_path}/m").file == Address.of(tmp_path / "m").file == tmp_path / "m"
    for wrong in ("node7", ":29600", "node7:", "node7:0", "node7:99999", "node7:http"):
        with pytest.raises(RefusedValueError, match="not a meeting point"):
            Address.of(wrong)
