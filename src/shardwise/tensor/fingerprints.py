"""Fingerprints of sharded tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from shardwise.containers.container import Sharded
from shardwise.exchange import Exchange, Proposal
from shardwise.exchange.messages import Tensors
from shardwise.geometry import Ints
from shardwise.job.plan import worthy_hosts
from shardwise.job.session import transport_for
from shardwise.job.sums import LANES, sums
from shardwise.job.verify import PartialTensor, spread_evenly
from shardwise.layout import Layout
from shardwise.planning import plan
from shardwise.tensor.call import Source
from shardwise.transports import GroupTransport

VERSION = 2  # of fingerprints: those of other versions differ for the same values
FIELDS = ("shape", "dtype", "source", "device")  # what all ranks must know


def fingerprint(x: Sharded | None, *, group: dist.ProcessGroup | None = None) -> str | None:
    """32 hex digits of the values of a sharded tensor: positions, bits, shape and dtype. Every rank of its group calls.

    They are the same under every sharding and on any number of ranks. They detect accidents, such as a lost shard or
    a flipped bit, but not attacks: other values with the same fingerprint can be computed on purpose. The
    terms of a partial tensor are reduced first. A rank that holds nothing passes None, as to `reshard`. (None comes
    back on a rank that is not in the mesh of a DTensor.)
    """
    source = Source.of(lambda: x)
    transport = transport_for(group, source.container, x, failed=source.error is not None)
    if transport is None:
        return None
    call = FingerprintCall(transport, source.on(transport))
    return transport.queue.run(call.finish)


class FingerprintCall:
    """One fingerprint on one rank, started where it is made: this rank's sums travel with the agreement.

    The terms of a partial tensor are moved with the agreement, and their sums added up after that.
    """

    def __init__(self, transport: GroupTransport, source: Source) -> None:
        self._transport, self._source = transport, source
        known = source.facts()
        self._fields: dict[str, Any] = {name: known.get(name, "unknown") for name in FIELDS}
        self._values: Tensors = []  # of a partial tensor
        self._exchange = self._make_exchange(frozenset(FIELDS).difference(known)).start()

    def _make_exchange(self, unknown: frozenset[str] = frozenset(), part_of: Exchange | None = None) -> Exchange:
        """What goes wrong is told to all."""
        fields = {"operation": "fingerprint", **self._fields}
        try:
            if self._source.error is not None:
                raise self._source.error
            proposal, layout, local = Proposal(fields, unknown), self._fields["source"], self._local()
            if unknown or layout.op is None:
                own = [0] * LANES if unknown & {"source"} or layout.op is not None else self._sums(layout, local)
                return Exchange(self._transport, proposal, note=own)
            device = local[0].device if local else torch.device(self._fields["device"])
            dtype: torch.dtype = self._fields["dtype"]
            hosts = worthy_hosts(self._transport.hosts, prod(layout.shape) * dtype.itemsize)
            move = PartialTensor(layout, local, dtype, device, hosts).reduced(self._transport.me)
            self._values = move.target
            return Exchange(self._transport, proposal, [move], device=device, part_of=part_of)
        except Exception as error:
            return Exchange(self._transport, Proposal(fields, error=error), note=[0] * LANES, part_of=part_of)

    def _local(self) -> Tensors:
        container, tensors = self._source.container, self._source.tensors
        return [t.resolve_conj().resolve_neg() for t in container.local(list(tensors))] if container else []

    def _sums(self, layout: Layout, local: Tensors) -> list[int]:
        own: list[int] = own_sums(layout, local, self._transport.me).tolist()
        return own

    def finish(self) -> str:
        """Wait for the others; the digits."""
        exchange, answers = self._exchange, self._exchange.finish()
        if answers is not None:
            self._fields = _told(answers)
        layout = self._fields["source"]
        if layout.op is None:
            return self._digits(exchange.noted())
        if answers is not None:
            self._make_exchange(part_of=exchange).start().finish()
        own = own_sums(spread_evenly(layout), self._values, self._transport.me)
        total = self._transport.all_reduce(own, "sum", exchange.number, in_order=False)()
        return self._digits(total.cpu().numpy())

    def _digits(self, total: Ints) -> str:
        return digits(total, self._fields["shape"], self._fields["dtype"])


def digits(total: Ints, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """The fingerprint of a tensor of that shape and dtype with these sums over all cells."""
    head = f"shardwise values {VERSION} {shape} {dtype} ".encode()
    return blake2b(head + total.tobytes(), digest_size=16).hexdigest()


def _told(answers: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """The fields of a rank that knows them."""
    known = next(fields for fields in answers if fields is not None)
    return {name: known[name] for name in FIELDS}


def own_sums(layout: Layout, local: Tensors, me: int) -> torch.Tensor:
    """The sums of this rank's share of the cells: each cell is counted by one rank, also if it has replicas."""
    if me not in layout:
        return torch.zeros(LANES, dtype=torch.int64, device="cpu")
    copies = plan(layout, Layout.replicated(layout.shape, [layout.owners()[0]])).for_owner(me).copies
    return sums(copies.boxes.take(copies.source == me), layout, me, local)
