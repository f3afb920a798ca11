"""Weights moved into an inference engine: recorded targets, against plain DTensors and against gather and load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import shardwise as sw
from benchmarks.measure import Effort, Row, Target
from benchmarks.model import FFN, HIDDEN, LAYERS, RANKS, WORDS, model, placement, tensor_of
from shardwise.bench.clock import Interval, Task, every_repeat, interleaved, together
from shardwise.bench.moves import Way, silence
from shardwise.testing import on_ranks

TITLE = "Inference engines"
ABOUT = """
The model of the section before, from FSDP rows to an engine of four tensor parallel ranks, with parameters as vLLM has
them: q, k and v in one, gate and up in one. `sw.engines.record` finds the targets by running the engine's own loader,
once. `Resharder.run` then fills the parameters. "Plain DTensors" is the same move into a tensor parallel model whose
parameters are not fused. "Gather and load" is the usual way: every tensor is gathered on all ranks (`full_tensor`) and
given to the engine's loader. All ways were found equal, bit for bit, before the clock started.

Recording is timed alone, on one rank: the model, and an engine with 10,240 tensors of experts.
"""
OURS, PLAIN, GATHER = "recorded", "plain DTensors", "gather and load"
FUSED = {"q": ("qkv", 0), "k": ("qkv", 1), "v": ("qkv", 2), "gate": ("gate_up", 0), "up": ("gate_up", 1)}
HEADS = {"qkv": (HIDDEN, HIDDEN // 4, HIDDEN // 4), "gate_up": (FFN, FFN)}


class Engine(torch.nn.Module):
    """The parameters of one tensor parallel rank, and a loader as engines have it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.weights = torch.nn.ParameterDict({"embed": _parameter(WORDS // RANKS, HIDDEN)})
        for layer in range(LAYERS):
            for name, sizes in HEADS.items():
                self.weights[f"{layer}_{name}"] = _parameter(sum(sizes) // RANKS, HIDDEN)
            self.weights[f"{layer}_o"] = _parameter(HIDDEN, HIDDEN // RANKS)
            self.weights[f"{layer}_down"] = _parameter(HIDDEN, FFN // RANKS)
            self.weights |= {f"{layer}_{norm}": _parameter(HIDDEN) for norm in ("norm1", "norm2")}

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Cut this rank's part out of every tensor, and put it where it belongs."""
        for name, weight in weights:
            layer, _, last = name.rpartition(".")
            fused, number = FUSED.get(last, (last, 0))
            target = self.weights[f"{layer}_{fused}" if layer else last]
            if fused in HEADS:
                start = sum(HEADS[fused][:number]) // RANKS
                target = target[start : start + HEADS[fused][number] // RANKS]
            place = placement(name)
            target.copy_(weight.chunk(RANKS, place.dim)[self.rank] if isinstance(place, Shard) else weight)


def _parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)


def rows(effort: Effort) -> Iterator[Row]:
    """All cases."""
    if dist.is_initialized():
        dist.destroy_process_group()
    found = on_ranks(RANKS, lambda rank: _measured(rank, effort.large), timeout=600)
    seconds = {way: together(spans[way] for spans, _, _ in found) for way in (OURS, PLAIN, GATHER)}
    moved, least = found[0][1:]
    size = f"{len(model())} tensors, {sum(map(prod, model().values())) * 2 / 2**30:.1f} GiB"
    bound = f"bytes: {moved / least:.3f} of the lower bound"
    yield Row(f"sync, {size}", seconds[OURS], seconds[GATHER], GATHER, Target(5), bound, moved=moved)
    yield Row(f"sync, {size}", seconds[OURS], seconds[PLAIN], PLAIN, Target(1.1, most=True))
    yield _recording("record", {name: (shape, torch.bfloat16) for name, shape in model().items()}, Engine(0), 1)
    experts = Experts(80, 64)
    yield _recording("record", experts.like(), experts, 6)


def _recording(
    what: str, like: dict[str, tuple[tuple[int, ...], torch.dtype]], engine: Engine | Experts, most: float
) -> Row:
    (recording,) = interleaved(Task(lambda _: sw.engines.record(engine.load_weights, like), lambda: None))
    return Row(f"{what} {len(like):,} tensors", recording.seconds, most, "seconds wanted at most", Target(1))


def _measured(rank: int, repeats: int) -> tuple[dict[str, list[Interval]], int, int]:
    silence()
    mesh, engine, plain = DeviceMesh("cpu", list(range(RANKS))), Engine(rank), Engine(rank)
    source = {name: tensor_of(shape, mesh, Shard(0)) for name, shape in model().items()}
    split = {name: tensor_of(shape, mesh, placement(name)) for name, shape in model().items()}
    target = sw.engines.record(engine.load_weights, source)
    sync, other = sw.Resharder(source, target), sw.Resharder(source, split)
    ways = {
        OURS: Way(lambda _: sync.run()),
        PLAIN: Way(lambda _: other.run()),
        GATHER: Way(lambda _: plain.load_weights((name, x.full_tensor()) for name, x in source.items())),
    }
    for way in ways.values():
        way.run(None)
    if not all(torch.equal(a, b) for a, b in zip(engine.parameters(), plain.parameters(), strict=True)):
        raise RuntimeError("the engines differ")
    spans, _ = every_repeat(*(way.job(repeats) for way in ways.values()))
    return dict(zip(ways, spans, strict=True)), sync.plan.bytes_moved, sync.plan.lower_bound


class Experts(torch.nn.Module):
    """Many small experts, stacked by layer."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        shapes = {"w13": (experts, 16, 8), "w2": (experts, 8, 8)}
        self.weights = torch.nn.ParameterDict(
            {f"{n}_{k}": _parameter(*s) for n in range(layers) for k, s in shapes.items()}
        )
        self.layers, self.experts = layers, experts

    def like(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The tensors of the checkpoint: gate and up of one expert in one tensor each."""
        names = ((n, e, k) for n in range(self.layers) for e in range(self.experts) for k in ("w13", "w2"))
        return {f"{n}.{e}.{k}": ((16 if k == "w13" else 8, 8), torch.bfloat16) for n, e, k in names}

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Into its place in the stack."""
        for name, weight in weights:
            layer, expert, last = name.split(".")
            self.weights[f"{layer}_{last}"][int(expert)].copy_(weight)
