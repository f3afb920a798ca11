"""Rules for a checkpoint with quantized tensors: where no rule names the scales, they follow their codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardwise.checkpoint.rules import Rules
from shardwise.checkpoint.streams import Stream
from shardwise.layout import Layout
from shardwise.quantized.layouts import scales_layout
from shardwise.quantized.recognition import Quantized, QuantizedTensor, recognize


class CoupledRules(NamedTuple):
    """Rules, and the quantized tensors whose scales they do not name, by the names of the scales."""

    rules: Rules
    by_scales: Mapping[str, QuantizedTensor]

    @staticmethod
    def of(rules: Rules, streams: Mapping[str, Stream]) -> CoupledRules:
        """For these tensors."""
        unnamed = {name for name in streams if not rules.matches(name)}
        found = recognize(streams, [Quantized()], rules.config).values() if unnamed else ()
        return CoupledRules(rules, {one.scales: one for one in found if one.scales in unnamed})

    def check(self, streams: Mapping[str, Stream], *, whole: bool) -> None:
        """Refuse tensors that do not fit the rules or their config.json."""
        named = {name: stream.shape for name, stream in streams.items() if name not in self.by_scales}
        self.rules.check(named, whole=whole)

    def layout(self, name: str, shape: tuple[int, ...]) -> Layout:
        """Of a tensor. Where a cut goes through a block, both sides have its scale."""
        one = self.by_scales.get(name)
        if one is None:
            return self.rules.layout(name, shape)
        return scales_layout(self.rules.layout(one.codes, one.codes_shape), one.format, shape)
