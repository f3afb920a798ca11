"""What rules expect of a model by its config.json: numbers, shapes, experts. It is checked before anything moves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.checkpoint.axis_rules import Known
from shardwise.checkpoint.expressions import Expression
from shardwise.checkpoint.model_config import Config, config_numbers, text_config
from shardwise.checkpoint.sharding_rule import numbers_by_prefix, numbers_in
from shardwise.errors import LayoutError

BARE = re.compile(r"\w*(?<!LMHead)Model")  # the class of a model without an output layer
THESE = "is it the config.json of these weights?"


@dataclass(frozen=True)
class Size:
    """The size of a dim: any (None), exactly that, or at least that."""

    expression: Expression | None
    at_least: bool = False

    def fits(self, size: int, known: Known) -> bool:
        """True also if the config does not have the numbers."""
        if self.expression is None or self.expression.names - known.numbers.keys():
            return True
        expected = known.value(self.expression)
        return size >= expected if self.at_least else size == expected

    def explained(self, known: Known) -> str:
        """For messages, with its value."""
        if self.expression is None:
            return "any"
        missing = self.expression.names - known.numbers.keys()
        return "at least " * self.at_least + (str(self.expression) if missing else known.explained(self.expression))


@dataclass(frozen=True)
class ModelFacts:
    """Of a kind of model: numbers by the first expression whose names are known, shapes and counts by patterns."""

    numbers: Mapping[str, Sequence[Expression]] = field(default_factory=dict)
    shapes: Mapping[str, Sequence[Size]] = field(default_factory=dict)
    counts: Mapping[str, Expression] = field(default_factory=dict)
    experts: Expression | None = None  # how many there are
    head: str | None = None  # a pattern: the output layer, which must be there if it is not tied
    config_name: str = "config.json"  # where the numbers come from, for messages

    def known(self, config: Config | None) -> Known:
        """The numbers of a config.json, and those that the rules compute from them.

        >>> facts = ModelFacts({"kv": [Expression("num_kv"), Expression("num_heads")]})
        >>> facts.known({"num_heads": 8, "text_config": {"layers": 2}}).numbers
        {'num_heads': 8, 'layers': 2, 'text_config': 1, 'kv': 8}
        """
        if config is None:
            return Known()
        numbers = config_numbers(config)
        for name, choices in self.numbers.items():
            found = next((choice for choice in choices if choice.names <= numbers.keys()), None)
            if found is not None:
                numbers[name] = found.value(numbers)
        return Known(numbers, config=True)

    def check_shape(self, name: str, shape: Sequence[int], known: Known) -> None:
        """Refuse a shape that the config contradicts."""
        sizes = next((sizes for pattern, sizes in self.shapes.items() if numbers_in(pattern, name) is not None), None)
        if not known.config or not sizes:  # an empty list: any shape
            return
        if len(sizes) != len(shape) or not all(s.fits(n, known) for s, n in zip(sizes, shape, strict=True)):
            expected = ", ".join(size.explained(known) for size in sizes)
            these = f"is it the {self.config_name} of these weights?"
            raise LayoutError(f"the shape is {tuple(shape)}, but {self.config_name} says ({expected}): {these}")

    def check_names(self, names: Iterable[str], config: Config, known: Known) -> None:
        """Refuse names that the config contradicts: other numbers of experts, or no output layer."""
        every = list(names)
        for pattern, count in self.counts.items():
            _check_count(pattern, known, count, every)
        if self._must_have_head(config) and not any(numbers_in(self.head or "", one) is not None for one in every):
            raise LayoutError(
                f"no tensor matches {self.head!r}, but config.json says that the output layer is not tied to the "
                f"embeddings (tie_word_embeddings = false): {THESE}"
            )

    def _must_have_head(self, config: Config) -> bool:
        """True for a model whose output layer is not tied. (LlamaModel is the class of a Llama without one.)"""
        tied = {**config, **text_config(config)}.get("tie_word_embeddings")
        classes = config.get("architectures")
        bare = isinstance(classes, list | tuple) and any(BARE.fullmatch(str(name)) for name in classes)
        return self.head is not None and tied is False and not bare


def _check_count(pattern: str, known: Known, count: Expression, names: Sequence[str]) -> None:
    """Refuse numbers in names other than 0 to count - 1."""
    for before, found in numbers_by_prefix(pattern, names).items():
        expected = range(known.count(count, f"the number of {pattern!r}"))
        if len(found) != len(expected) or max(found) not in expected:
            wrong = next((at for at in expected if at not in found), len(expected))
            what = f"number {wrong} is {'missing' if wrong in expected else 'too many'}"
            raise LayoutError(
                f"{pattern!r} matches {len(found)} numbers below {before!r}, but config.json says "
                f"{known.explained(count)}: {what}; {THESE}"
            )
