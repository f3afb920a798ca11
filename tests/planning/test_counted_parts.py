"""One owner's part of a plan with replicas or hosts: as much memory as its own copies, and what the whole plan has."""

import sys
import tracemalloc

import pytest
from copying import assert_parts_agree, assert_right, hosted
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import parse, plan
from shardwise.planning import choose
from shardwise.testing import strategies

GRIDS = ["mesh", "partial", "chunk", "cyclic", "replicated"]


@pytest.fixture
def nothing_remembered():
    part = sys.modules["shardwise.planning.plan"]._part
    part.cache_clear()
    yield part.cache_clear
    part.cache_clear()


@st.composite
def choices(draw):
    """Two grids, hosts or none, and limits of the planner under which much is split."""
    source, target, hosts = draw(hosted(GRIDS))
    least, senders = draw(st.sampled_from([1, 2, 5, 2**15])), draw(st.sampled_from([1, 2, 8]))
    return source, target, draw(st.sampled_from([None, 2, 3, hosts])), least, senders


@given(choices())
@settings(max_examples=60)
def test_counting_finds_what_listing_finds(case):
    source, target, hosts, least, senders = case
    forget = sys.modules["shardwise.planning.plan"]._part.cache_clear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "LEAST_SHARE", least)
        patch.setattr(choose, "MOST_SENDERS", senders)
        forget()
        made = plan(source, target, hosts=hosts)
        assert_parts_agree(made)
        assert_right(made)
        assert made.peak_bytes <= made.most_bytes
    forget()


PAIRS = {
    "two replicas to everybody": ("R,S0@2x1024", "R@2048"),
    "shards to everybody": ("S0@2048", "R@2048"),
    "HSDP to tensor parallel": ("S0,R@128x16", "R,S1@128x16"),
    "replicas of rows to replicas of columns": ("S0,R@1024x2", "S1,R@1024x2"),
    "blocks of rows to blocks of columns": ("R,S0,S1@4x128x4", "S1,S0,R@16x32x4"),
    "replicas to shards": ("R,S0@16x128", "S0@2048"),
    "one replica to everybody": ("R@1", "R@2048"),
    "interleaved replicas to everybody": ("R,cyclic0=16@2x1024", "R@2048"),
    "terms to everybody": ("P@2048", "R@2048"),
    "terms with replicas to everybody": ("P,R@256x8", "R@2048"),
    "shards of terms to everybody": ("S0,P@256x8", "R@2048"),
    "terms to shards": ("P@2048", "S0@2048"),
    "replicas of terms to replicas of shards": ("R,P@8x256", "S0,R@256x8"),
    "terms of shards to shards of columns": ("P,S0@256x8", "S1@2048"),
    "terms to others": ("P@1024", "R,S0@32x32:1024-2047"),
}


@pytest.mark.parametrize("hosts", [None, 8])
@pytest.mark.parametrize(("source", "target"), PAIRS.values(), ids=PAIRS)
def test_one_owners_part_takes_memory_for_its_own_copies_and_the_world_once(nothing_remembered, source, target, hosts):
    made = plan(parse(f"32768x4096/{source}"), parse(f"32768x4096/{target}"), hosts=hosts)
    for owner in (0, 777):
        part = made.for_owner(owner)
        nothing_remembered()
        tracemalloc.start()
        try:
            made.for_owner(owner)
            words = tracemalloc.get_traced_memory()[1] // 8
        finally:
            tracemalloc.stop()
        assert words <= 64 * (len(made.owners) + len(part.copies))


def test_terms_that_are_reduced_and_shared_are_not_counted_for_every_taker():
    made = plan("65536x8192/P@65536", "65536x8192/R@65536")
    assert made.lower_bound == 4 * 65536 * 8192 * 2 * 65535


WORLD = ["S0@64", "S1@64", "S0,S1@8x8", "S1,S0@8x8", "S0,R@32x2", "cyclic0=8@64", "R@64", "S0,S0,S1@4x4x4"]
TAKEN = [*WORLD, "R,S0@8x8", "S0,R@8x8", "R,S1@2x32", "R,S0,R@4x4x4", "R@8", "S0@16"]


@pytest.mark.parametrize("source", WORLD)
def test_hosts_take_at_most_twice_the_staging_and_the_rounds(source):
    for target in TAKEN:
        pair = f"1024x1024/{source}", f"1024x1024/{target}"
        apart, together = (plan(*pair, hosts=hosts) for hosts in (None, 8))
        assert together.most_bytes <= 2 * apart.most_bytes, target
        assert together.peak_bytes <= together.most_bytes
        apart, together = (plan(*pair, hosts=hosts, max_bytes=2**20) for hosts in (None, 8))
        assert together.rounds <= 2 * apart.rounds, target


@given(hosted())
@settings(max_examples=60)
def test_no_owner_stages_more_than_the_bound(case):
    source, target, hosts = case
    for where in (None, hosts):
        made = plan(source, target, hosts=where)
        assert made.peak_bytes <= made.most_bytes


@given(st.integers(1, 4), st.integers(1, 4), strategies.layouts((7, 5), ["mesh", "chunk", "replicated"]))
@settings(max_examples=40)
def test_replicas_on_other_hosts_share_what_is_fetched_to_the_cell(blocks, replicas, target):
    names = ",".join(str(100 + n) for n in range(blocks * replicas))
    source = parse(f"7x5/S0,R@{blocks}x{replicas}:{names}")
    hosts = {owner: owner if owner >= 100 else owner % 2 for owner in {*source.owners(), *target.owners()}}
    made = plan(source, target, itemsize=1, hosts=hosts)
    for block in range(blocks):
        sent = [made.sent[100 + block * replicas + r] for r in range(replicas)]
        assert max(sent) - min(sent) <= 1
