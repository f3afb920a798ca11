"""Fingerprints of sharded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from shardwise.exchange import Exchange, Terms
from shardwise.job.checksum import LANES, sums
from shardwise.job.collective_call import Call
from shardwise.job.serial_queue import SerialQueue
from shardwise.job.session import transport_for
from shardwise.job.source import Held, SourceFacts
from shardwise.job.verify import spread
from shardwise.layout import Layout
from shardwise.planning import plan
from shardwise.transports import GroupTransport

Tensors = Sequence[torch.Tensor]


def fingerprint(x: Any, *, group: dist.ProcessGroup | None = None) -> str | None:
    """32 hex digits of the values of a sharded tensor: positions, bits, shape and dtype. Every rank of its group calls.

    The same under every sharding and number of ranks, today and tomorrow. It guards against accidents, such as a lost
    shard or a flipped bit, and not against an adversary: other values with the same fingerprint can be computed. The
    terms of a partial tensor are reduced first. A rank that holds nothing passes None, as to `reshard`. (None comes
    back on a rank that is not in the mesh of a DTensor.)
    """
    held = Held.of(x)
    transport = transport_for(group, held, x)
    if transport is None:
        return None
    held = held.on(transport)
    known = {name: held.known().get(name, "unknown") for name in ("shape", "dtype", "source", "device")}
    guessed = frozenset(known).difference(held.known())
    exchange = Exchange(transport, Terms({"operation": "fingerprint", **known}, guessed, held.error)).start()
    return SerialQueue.of(transport).run(lambda: _fingerprint(transport, held, exchange))


def _fingerprint(transport: GroupTransport, held: Held, exchange: Exchange) -> str:
    told = exchange.finish()
    fields = exchange.terms.fields if told is None else next(fields for fields in told if fields is not None)
    facts = SourceFacts(fields["shape"], fields["dtype"], fields["source"], fields["device"], gradient=False)
    layout = facts.source
    local = [t.resolve_conj().resolve_neg() for t in held.kind.local(held.tensors)] if held.kind else []
    if layout.op is not None:
        layout = spread(layout)
        local = Call.value(transport, held, facts, layout, exchange)
    total = transport.reduced(_once(layout, local, transport.me), "sum", apart=exchange.number)()
    head = f"shardwise values 1 {facts.shape} {facts.dtype} ".encode()
    return blake2b(head + total.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def _once(layout: Layout, local: Tensors, me: int) -> torch.Tensor:
    """The sums of the cells for which this rank speaks: every cell has one such rank, also where there are replicas."""
    if me not in layout:
        return torch.zeros(LANES, dtype=torch.int64)
    copies = plan(layout, Layout.replicated(layout.shape, [layout.owners()[0]])).for_owner(me).copies
    return sums(copies.boxes.take(copies.source == me), layout, me, local)
