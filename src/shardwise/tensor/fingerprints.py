"""Fingerprints of sharded tensors."""

from __future__ import annotations

from hashlib import blake2b

import torch
import torch.distributed as dist

from shardwise.containers.container import Sharded
from shardwise.exchange import Exchange, Proposal
from shardwise.exchange.messages import Tensors
from shardwise.job.session import transport_for
from shardwise.job.verify import LANES, PartialTensor, reduced_values, spread_evenly, sums
from shardwise.layout import Layout
from shardwise.planning import plan
from shardwise.tensor.call import Source
from shardwise.transports import GroupTransport

FIELDS = ("shape", "dtype", "source", "device")  # what all ranks must know


def fingerprint(x: Sharded | None, *, group: dist.ProcessGroup | None = None) -> str | None:
    """32 hex digits of the values of a sharded tensor: positions, bits, shape and dtype. Every rank of its group calls.

    The same under every sharding and number of ranks, today and tomorrow. It guards against accidents, such as a lost
    shard or a flipped bit, and not against an adversary: other values with the same fingerprint can be computed. The
    terms of a partial tensor are reduced first. A rank that holds nothing passes None, as to `reshard`. (None comes
    back on a rank that is not in the mesh of a DTensor.)
    """
    source = Source.of(lambda: x)
    transport = transport_for(group, source.container, x, failed=source.error is not None)
    if transport is None:
        return None
    source = source.on(transport)
    known = source.facts()
    fields = {name: known.get(name, "unknown") for name in FIELDS}
    proposal = Proposal({"operation": "fingerprint", **fields}, frozenset(FIELDS).difference(known), source.error)
    exchange = Exchange(transport, proposal).start()
    return transport.queue.run(lambda: _fingerprint(transport, source, exchange))


def _fingerprint(transport: GroupTransport, source: Source, exchange: Exchange) -> str:
    answers = exchange.finish()
    fields = exchange.proposal.fields if answers is None else next(known for known in answers if known is not None)
    dtype, layout = fields["dtype"], fields["source"]
    local: Tensors = (
        [t.resolve_conj().resolve_neg() for t in source.container.local(list(source.tensors))]
        if source.container
        else []
    )
    if layout.op is not None:
        partial = PartialTensor(layout, local, dtype, local[0].device if local else torch.device(fields["device"]))
        layout, (local, *_) = spread_evenly(layout), reduced_values(transport, [partial], exchange)
    total = transport.all_reduce(_once(layout, local, transport.me), "sum", exchange.number, in_order=False)()
    head = f"shardwise values 1 {fields['shape']} {dtype} ".encode()
    return blake2b(head + total.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def _once(layout: Layout, local: Tensors, me: int) -> torch.Tensor:
    """The sums of this rank's share of the cells: each cell is counted by one rank, also if it has replicas."""
    if me not in layout:
        return torch.zeros(LANES, dtype=torch.int64)
    copies = plan(layout, Layout.replicated(layout.shape, [layout.owners()[0]])).for_owner(me).copies
    return sums(copies.boxes.take(copies.source == me), layout, me, local)
