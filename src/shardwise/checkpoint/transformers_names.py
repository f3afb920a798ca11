"""transformers' own conversions of checkpoints, as `rename=` and `remap=`.

Names are matched by transformers itself. Only its operations on tensors are translated: they become views.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch

from shardwise.containers.memory import is_meta
from shardwise.containers.modules import without_fsdp
from shardwise.errors import CheckpointError
from shardwise.job.remap import Concat, Remap, Rotary, Stack, Transposed
from shardwise.job.remap_rules import RotaryOrder

Shapes = Mapping[str, tuple[int, ...]]
Names = Mapping[str, Sequence[str]]  # by the pattern that they match
CORE, MAPPING = "transformers.core_model_loading", "transformers.conversion_mapping"
REMEDY = (
    "load the model with from_pretrained and save its state_dict() with shardwise.checkpoint.save: load takes that "
    "into any module"
)


class Conversion(NamedTuple):
    """What becomes of the tensors of a checkpoint: their new names, and how they are put together."""

    names: dict[str, str]
    rules: list[Remap]


def is_pretrained(module: torch.nn.Module) -> bool:
    """True for a model of transformers 5 or later, which says how checkpoints are converted."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel) and MAPPING in sys.modules


def tie(model: Any) -> None:
    """Tie weights on the meta device that a tensor parallel plan has made separate, as from_pretrained does."""
    pairs = ([model.get_parameter(name) for name in pair] for pair in model.all_tied_weights_keys.items())
    if any(one is not other and is_meta(one) and is_meta(other) for one, other in pairs):
        model.tie_weights(recompute_mapping=False)


def conversion(model: Any, stored: Shapes, wanted: Shapes) -> Conversion:
    """How the tensors of a checkpoint (`stored`) become those of a model (`wanted`)."""
    core, mapping = import_module(CORE), import_module(MAPPING)
    found = mapping.get_model_conversion_mapping(_unsharded(model), hf_quantizer=getattr(model, "hf_quantizer", None))
    renamings = [one for one in found if isinstance(one, core.WeightRenaming)]
    converters = [one for one in found if isinstance(one, core.WeightConverter)]
    names, groups = _renamed(model, stored, wanted, renamings, list(dict.fromkeys(converters)))
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    rules = list[Remap]()
    for target, parts in groups.items():
        chain = Chain(by_pattern[next(iter(parts))], target, parts, stored, wanted, model.config)
        rules += chain.rules
        names |= chain.names
    return Conversion(names, rules)


def _renamed(
    model: Any, stored: Shapes, wanted: Shapes, renamings: list[Any], converters: list[Any]
) -> tuple[dict[str, str], dict[str, dict[str, list[str]]]]:
    """The new names of all tensors; and, by target and pattern, the names that a converter takes."""
    core = import_module(CORE)
    names, groups = dict[str, str](), dict[str, dict[str, list[str]]]()
    for name in sorted(stored, key=core.dot_natural_key):  # some of its rules depend on the order
        target, pattern = core.rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        names[name] = target if target in wanted and pattern is None else name
        if target in wanted and pattern is not None:
            groups.setdefault(target, {}).setdefault(pattern, []).append(name)
    return names, groups


def _unsharded(model: Any) -> Any:
    """A stand-in with the classes that the model had before fully_shard: conversions are found by their names."""

    def bare(module: Any) -> Any:
        kind: Any = without_fsdp(type(module))
        stand_in = kind.__new__(kind)
        torch.nn.Module.__init__(stand_in)
        stand_in.config = module.config
        return stand_in

    modeling = sys.modules["transformers.modeling_utils"]
    inner = [(name, bare(one)) for name, one in model.named_modules() if isinstance(one, modeling.PreTrainedModel)]
    inner[0][1].named_modules = lambda: iter(inner)
    return inner[0][1]


class Chain:
    """The operations of one converter on the tensors of one target, as rules."""

    def __init__(
        self, converter: Any, target: str, parts: Names, stored: Shapes, wanted: Shapes, config: object
    ) -> None:
        self.rules, self.names = list[Remap](), dict[str, str]()
        self._converter, self._target, self._config = converter, target, config
        self._stored, self._wanted = stored, wanted
        self._parts = {pattern: list(parts[pattern]) for pattern in converter.source_patterns if pattern in parts}
        taken = [name for names in parts.values() for name in names if name in wanted and name != target]
        if taken:
            self._refuse(f"{taken[0]!r} is a tensor of the model itself")
        names = [type(operation).__name__ for operation in converter.operations]
        for number, operation in enumerate(converter.operations):
            self._last = set(names[number + 1 :]) <= {"PermuteForRope"}  # which has the names of the targets
            self._translation(operation)(operation)
        if self._every != [target] and len(self._every) == 1 and self._every[0] in stored:
            self.names[self._every[0]] = target

    def _translation(self, operation: object) -> Callable[[Any], None]:
        table: dict[str, Callable[[Any], None]] = {
            "MergeModulelist": self._stack,
            "Concatenate": self._concat,
            "Chunk": self._chunk,
            "Transpose": self._transpose,
            "Interleave": self._interleave,
            "PermuteForRope": self._permute_for_rope,
        }
        name = type(operation).__name__
        if name not in table or getattr(type(operation), "__module__", "") != CORE:
            self._refuse(f"{operation!r} is not a change of place")
        return table[name]

    @property
    def _every(self) -> list[str]:
        return [name for names in self._parts.values() for name in names]

    def _only(self) -> str:
        if len(self._every) != 1:
            self._refuse(f"{len(self._every)} tensors are given where one is needed")
        return self._every[0]

    def _stack(self, operation: Any) -> None:
        for pattern, names in self._parts.items():
            part = self._numbered(names)
            whole = self._target if self._last and len(self._parts) == 1 else part.replace("{}", "all")
            self.rules.append(Stack(whole, part, operation.dim))
            self._parts[pattern] = [whole]

    def _concat(self, operation: Any) -> None:
        whole = self._target if self._last else f"{self._target}.joined"
        self.rules.append(Concat(whole, self._every, operation.dim))
        self._parts = {next(iter(self._parts)): [whole]}

    def _chunk(self, operation: Any) -> None:
        if not self._last:
            self._refuse(f"{operation!r} is not its last operation")
        patterns = operation.get_target_patterns(self._converter.target_patterns, config=self._config)
        before, _, after = self._target.partition(patterns[0])
        targets = [f"{before}{pattern}{after}" for pattern in patterns]
        self.rules.append(Concat(self._only(), targets, operation.dim))
        self._parts = {pattern: [target] for pattern, target in zip(patterns, targets, strict=True)}

    def _transpose(self, operation: Any) -> None:
        name = self._only()
        shape = self._stored.get(name, self._wanted[self._target])
        if operation.check_dims and shape == self._wanted[self._target]:
            return
        order = list(range(len(shape)))
        order[operation.dim0], order[operation.dim1] = order[operation.dim1], order[operation.dim0]
        renamed = self._target if self._last and name in self._stored else name
        self.rules.append(Transposed(renamed, order))

    def _interleave(self, operation: Any) -> None:
        """Cells that alternate become two halves of the dim, as the rotary cells of one large head do; or back."""
        name = self._only()
        shape = self._stored.get(name) or self._wanted[self._target]
        renamed = self._target if self._last and name in self._stored else name
        to: RotaryOrder = "pairs" if operation.inverse else "halves"
        self.rules.append(Rotary(renamed, shape[operation.dim], to, dim=operation.dim))

    def _permute_for_rope(self, operation: Any) -> None:
        config: Any = getattr(self._config, operation.subconfig_key or "", self._config)
        to: RotaryOrder = "pairs" if operation.inverse else "halves"
        for pattern, names in self._parts.items():
            if any(part in pattern for part in operation.permute_layer_names):
                for name in names:
                    head = self._wanted[name][0] // getattr(config, "num_attention_heads", 1)
                    self.rules.append(Rotary(name, head, to))

    def _numbered(self, names: Sequence[str]) -> str:
        """The pattern of names that differ in a number, which counts from 0."""
        for number in reversed(list(re.finditer(r"\d+", names[0]))):
            pattern = f"{names[0][: number.start()]}{{}}{names[0][number.end() :]}"
            if [pattern.replace("{}", str(at)) for at in range(len(names))] == list(names):
                return pattern
        return self._refuse(f"{names[0]!r} and {len(names) - 1} more are not numbered 0, 1, 2 and so on")

    def _refuse(self, why: str) -> Any:
        raise CheckpointError(
            f"{self._target!r} cannot be loaded by transformers' {self._converter!r}: {why}; {REMEDY}"
        )
