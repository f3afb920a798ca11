"""The zeros of padding: a source that every owner of the target has, so that nothing of it moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from shardwise.job.plan import TensorInfo
from shardwise.job.remap import Link
from shardwise.layout import Layout


def zeros_layout(link: Link, target: Layout) -> Layout:
    """Where the zeros of a link are."""
    return Layout.replicated(link.source_view.shape, target.owners())


def zeros_infos(links: Iterable[Link], targets: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The zeros that links need, as sources."""
    wanted = ((link, targets[link.target]) for link in links if link.zeros)
    return {
        link.source: TensorInfo(link.source_view.shape, to.dtype, zeros_layout(link, to.layout), to.device)
        for link, to in wanted
    }


def zeros_memory(infos: Mapping[str, TensorInfo], me: int) -> dict[str, torch.Tensor]:
    """One zero in memory for all cells of each, on ranks that need them."""
    return {
        name: torch.zeros((), dtype=info.dtype, device=info.device).expand(info.shape)
        for name, info in infos.items()
        if me in info.layout
    }
