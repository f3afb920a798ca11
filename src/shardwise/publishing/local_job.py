"""What a job finds out about itself before it publishes or subscribes: its tensors, its host, its meeting point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardwise.containers.description import Descriptions, describe_all
from shardwise.job.agree import Callers
from shardwise.job.plan import TensorInfo
from shardwise.job.side import combine_descriptions
from shardwise.publishing.mapping import host_of_this_process
from shardwise.publishing.meeting import Address, At, MeetingPoint
from shardwise.publishing.orders import Paths
from shardwise.publishing.presence import check_patience
from shardwise.publishing.sealing import Key
from shardwise.state.sync_plan import tensors_by_name
from shardwise.state.traverse import StateDict


class LocalJob(NamedTuple):
    """`values`: this rank's tensors; `infos`: those of all ranks. `host`: that of all ranks, if it is one."""

    values: dict[str, Any]
    infos: dict[str, TensorInfo]
    host: str | None
    paths: Paths
    meeting: MeetingPoint


class RankDescription(NamedTuple):
    """What a rank tells the others of its job: its tensors, its host, and a digest of the secret that it was given."""

    descriptions: Descriptions
    host: str | None
    secret: str


def describe_job(
    callers: Callers,
    state_dict: StateDict,
    at: At,
    name: str,
    key: Key,
    patience: float,
    *,
    side: str,
    check: Callable[[], None],
    same: Mapping[str, object],
) -> LocalJob:
    """All ranks call. `check` refuses options of one rank, `same` are those that must be equal on all of them.

    `side`: what errors call the state dict.
    """

    def describe() -> tuple[tuple[dict[str, Any], Paths, MeetingPoint], RankDescription]:
        check()
        check_patience(patience)
        values = tensors_by_name(state_dict)
        paths, meeting = Paths.of(name), MeetingPoint(Address.of(at), key, patience)
        return (values, paths, meeting), RankDescription(
            describe_all(values, callers.transport), host_of_this_process(), meeting.secret_digest
        )

    (values, paths, meeting), by_rank = callers.tell(describe, {"name": name, "at": str(at), **same})
    with callers.refusals():
        if len({one.secret for one in by_rank.values()}) > 1:
            raise ValueError("the ranks give different secrets: give the same key= on all ranks")
        infos = combine_descriptions({rank: one.descriptions for rank, one in by_rank.items()}, side)
    hosts = {one.host for one in by_rank.values()}
    return LocalJob(values, infos, hosts.pop() if len(hosts) == 1 else None, paths, meeting)
