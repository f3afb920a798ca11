"""How often a call between hosts has to wait for the others: each time, messages take their time over the link."""

import socket

import pytest
import torch
from ranks import ranks  # noqa: F401

import shardwise as sw
from shardwise.transports.process_group import GroupTransport

ROWS, COLUMNS, TERMS = "64x64/S0@4", "64x64/S1@4", "64x64/P@4"
ONE, ALL = "32x32/R@1", "32x32/R@4"
LARGE = "512x512/S0@4", "512x512/S1@4"  # messages that do not travel with the agreement


def counting(hosts, rank):
    """A list that gets an entry for every round of messages between hosts."""
    rounds, post, collective = [], GroupTransport.post_messages, GroupTransport._collective_all_to_all

    def posting(self, receives, sends, tag):
        sends = list(sends)
        if any(hosts[peer] != hosts[rank] for peer, _ in (*receives, *sends)):
            rounds.append("messages")
        return post(self, receives, sends, tag)

    def agreeing(self, rows):
        rounds.append("agreement")
        return collective(self, rows)

    GroupTransport.post_messages, GroupTransport._collective_all_to_all = posting, agreeing
    return rounds


def held(text, rank):
    local = sw.parse(text).local_shape(rank)
    return sw.ShardedTensor(torch.ones(local), text)


@pytest.mark.parametrize("hosts", ["aabb", "abab", "abcd"])
def test_small_calls_take_as_few_rounds_between_hosts_as_can_be(ranks, hosts):  # noqa: F811
    def run(rank):
        socket.gethostname = lambda: hosts[rank]
        rounds = counting(hosts, rank)

        def of(call):
            rounds.clear()
            call()
            return len(rounds)

        x, terms, some = held(ROWS, rank), held(TERMS, rank), held(ONE, 0) if rank == 0 else None
        large, kept = held(LARGE[0], rank), []
        found = {"first": of(lambda: sw.reshard(x, COLUMNS))}
        found["reshard"] = of(lambda: sw.reshard(x, COLUMNS))
        found["fingerprint"] = of(lambda: sw.fingerprint(x))
        found["verify"] = of(lambda: sw.reshard(x, COLUMNS, verify=True))
        found["large"] = of(lambda: sw.reshard(large, LARGE[1]))
        found["large, verify"] = of(lambda: sw.reshard(large, LARGE[1], verify=True))
        found["fingerprint of terms"] = of(lambda: sw.fingerprint(terms))
        found["None"] = of(lambda: sw.reshard(some, ALL))
        found["fingerprint of None"] = of(lambda: sw.fingerprint(some))
        found["Resharder"] = of(lambda: kept.append(sw.Resharder({"w": x}, {"w": sw.empty(COLUMNS)}, verify=True)))
        found["run"] = of(kept[0].run)
        return found

    for found in ranks(4, run):
        assert found == {
            "first": 2,  # who is who, and the agreement
            "reshard": 1,
            "fingerprint": 1,
            "verify": 2,  # the agreement with all messages, the sums
            "large": 2,
            "large, verify": 3,
            "fingerprint of terms": 2,  # the agreement with all terms, the sums of their values
            "None": 3,  # the agreement, what the source is, the agreement with all messages
            "fingerprint of None": 2,
            "Resharder": 4,
            "run": 2,
        }
