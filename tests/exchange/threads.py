"""Exchanges in one process: every owner is a thread, and its tensors lie in memory in many ways."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from hypothesis import strategies as st

from shardwise.exchange import Exchange, Move, Proposal
from shardwise.transports.in_memory import in_memory_transports

PATIENCE = 20.0  # seconds until a thread that waits for a message that never comes gives up
JUNK = 85  # what memory holds that no cell lies in


def outcomes(transports, work):
    """For every transport what `work(transport)` gives or raises, each in a thread of its own."""
    with ThreadPoolExecutor(len(transports)) as threads:
        tasks = [threads.submit(work, transport) for transport in transports]
        return [task.exception() or task.result() for task in tasks]


def together(transports, work):
    """The results of `work(transport)`. Raises the first error; nobody waits for the one that failed."""
    errors = []

    def watched(transport):
        try:
            return work(transport)
        except BaseException as error:
            errors.append(error)
            for (source, *_), queue in list(transport._queues.items()):
                if source == transport.me:
                    queue.put(None)
            raise

    found = outcomes(transports, watched)
    if errors:
        raise errors[0]
    return found


def transports_of(*plans):
    """A transport for everybody who takes part in one of the plans."""
    return in_memory_transports(sorted({owner for made in plans for owner in made.owners}), timeout=PATIENCE)


def counted(transport):
    """The sends and receives of all rounds of a transport from now on, as two lists."""
    sent, received, post_round = [], [], transport.post_round

    def counting(receives, sends, *args, **options):
        sent.extend(sends)
        received.extend(receives)
        return post_round(receives, sends, *args, **options)

    transport.post_round = counting
    return sent, received


# --- tensors ---------------------------------------------------------------------------------------------------------


def plain(shape, dtype):
    """A tensor as torch makes it."""
    return torch.full(shape, JUNK).to(dtype)


def turned(shape, dtype):
    """The last dim is the outermost in memory."""
    return plain(shape[::-1], dtype).permute(tuple(reversed(range(len(shape)))))


def spaced(shape, dtype):
    """Every second element of every dim of a larger tensor, from the second on."""
    if not shape:
        return plain((3,), dtype)[1]
    return plain([2 * size + 1 for size in shape], dtype)[tuple(slice(1, None, 2) for _ in shape)]


def shifted(shape, dtype):
    """The rows in the middle of a larger tensor."""
    if not shape:
        return plain((3,), dtype)[2]
    return plain((shape[0] + 2, *shape[1:]), dtype)[1:-1]


def padded(shape, dtype):
    """The first columns of a wider tensor."""
    return plain((*shape[:-1], shape[-1] + 3), dtype)[..., :-3] if shape else plain((2,), dtype)[0]


def swapped(shape, dtype):
    """The outer dims change places in memory, rows stay rows."""
    order = (*reversed(range(len(shape) - 1)), len(shape) - 1) if shape else ()
    return plain(tuple(shape[axis] for axis in order), dtype).permute(order)


FORMS = (plain, turned, spaced, shifted)
forms = st.sampled_from((*FORMS, padded, swapped))


def tensors_of(arrays, dtype, form=plain):
    """Arrays as tensors of any dtype: their bits where they have the itemsize of the dtype but are not of its kind."""
    found = [form(array.shape, dtype) for array in arrays]
    for tensor, array in zip(found, arrays, strict=True):
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape).view(dtype))
    return found


def arrays_of(tensors, dtype):
    """The way back: what the tensors hold as arrays of a numpy dtype of the same size."""
    raw = [
        tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy() for tensor in tensors
    ]
    return [r.view(dtype).reshape(tuple(t.shape)) for r, t in zip(raw, tensors, strict=True)]


def untouched(tensor):
    """True where the memory around the cells of a tensor still holds junk. (The cells are lost.)"""
    tensor.copy_(plain(tensor.shape, tensor.dtype))
    around = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).view(torch.uint8)
    junk = plain((1,), tensor.dtype).view(torch.uint8)
    return bool((around.reshape(-1, len(junk)) == junk).all())


def rooms(plan, owner, dtype, form=plain):
    """Tensors of the target's shapes, full of junk."""
    shapes = plan.target.local_shapes(owner) if owner in plan.target else ()
    return [form(shape, dtype) for shape in shapes]


# --- exchanges -------------------------------------------------------------------------------------------------------


def carried(plan, sources, *, dtype=None, form=plain, becomes=None, transports=None):
    """The target's tensors of every owner after an exchange of one tensor."""
    dtype = dtype or next(t.dtype for tensors in sources.values() for t in tensors)
    targets = {o: rooms(plan, o, becomes or dtype, form) for o in plan.target.owners()}

    def work(transport):
        move = Move.of(plan, transport.me, sources.get(transport.me, []), targets.get(transport.me, []), dtype)
        return Exchange(transport, terms(), [move]).start().finish()

    assert together(transports or transports_of(plan), work) == [None] * len(transports or plan.owners)
    return targets


def terms(**fields):
    """What everybody brings who asks for the same."""
    return Proposal({"operation": "reshard", **fields})
