"""LoRA adapters of peft, merged into a checkpoint: each weight becomes base + scale * B @ A, computed when it is read.

Products of two values are exact in float64, and are added one after the other, so that the bits of a cell depend on
nothing but its own row and column: not on the sharding of what is written, nor on how much is read at a time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import cast

import torch

from shardwise.checkpoint.entry import Checkpoint, Entry
from shardwise.checkpoint.model_config import Config, read_config
from shardwise.checkpoint.opening import open
from shardwise.checkpoint.quantized import ComputedEntry
from shardwise.errors import CheckpointError
from shardwise.geometry import Box, Boxes
from shardwise.job.casts import PLAIN
from shardwise.job.names import missing
from shardwise.quoting import brief
from shardwise.storage.paths import PathLike

CONFIG, PREFIX = "adapter_config.json", "base_model.model."
ROWS = 64  # of a product that are computed at a time: they stay in the cache
PART = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<part>[AB])(?P<what>\.weight|\.bias)?")
ORDINARY = (None, True, False, "gaussian", "orthogonal", "eva")  # of init_lora_weights: others change the base model
HARMLESS = {  # the other fields of a config that say nothing about a merge, or that are heeded
    *(
        "peft_type",
        "peft_version",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "task_type",
        "inference_mode",
    ),
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out", "lora_bias", "bias"),
    *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "init_lora_weights", "eva_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
    *("runtime_config",),
}
SAFE_PATTERN = re.compile(r"(?:[\w^$|()-]|\\[.d]|\.|\[[\w-]+\]){1,200}")  # without what is repeated
REPEATED = re.compile(r"(\\d|\.|\])[+*]")
Delta = Callable[[Box], torch.Tensor]  # what is added to the cells of a box, in float64


def with_adapter(opened: Checkpoint, path: PathLike) -> Checkpoint:
    """The same checkpoint with a LoRA adapter merged into it."""
    adapter = open(path)
    if not adapter.files.has(CONFIG):
        raise CheckpointError(f"{adapter.path} has no {CONFIG} beside it: merge= needs the folder that peft wrote")
    config = read_config(adapter.files, CONFIG)
    _check_config(config, adapter)
    deltas, replaced = _deltas(adapter, config)
    prefix = _prefix(opened, [*deltas, *replaced], adapter)
    merged = {
        f"{prefix}{name}": _merged(opened, f"{prefix}{name}", deltas.get(name, []), replaced.get(name), adapter)
        for name in (*deltas, *replaced)
    }
    return opened.replaced({name: merged.get(name, entry) for name, entry in opened.items()})


def _check_config(config: Config, adapter: Checkpoint) -> None:
    """Refuse what is not a plain LoRA, by name."""
    where = adapter.files.label(CONFIG)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type is {brief(config.get('peft_type'))}: only LORA is merged")
    strange = [field for field, value in config.items() if value and field not in HARMLESS]
    if config.get("init_lora_weights") not in ORDINARY:
        strange.append("init_lora_weights")
    if strange:
        raise CheckpointError(
            f"{where}: {strange[0]} is {brief(config[strange[0]])}, which is not a plain LoRA: only base + scale * "
            f"B @ A is merged. Remedy: merge it with peft's merge_and_unload"
        )


# --- what is added ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """scale * B @ A, or its transpose."""

    a: Entry
    b: Entry
    scale: float
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        out, into = self.b.shape[0], self.a.shape[1]
        return (into, out) if self.transposed else (out, into)

    def cells(self, box: Box) -> torch.Tensor:
        """Row-major, in float64."""
        (top, left), (bottom, right) = box.lo, box.hi
        if self.transposed:
            top, left, bottom, right = left, top, right, bottom
        rank = self.a.shape[0]
        a = self.a.read(Box((0, left), (rank, right))).double()
        b = self.b.read(Box((top, 0), (bottom, rank))).double()
        made = _product(b, a).mul_(self.scale)
        return made.t() if self.transposed else made


def _product(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Terms are added in the order of the rank: a product of matrices has another order for other sizes."""
    made = torch.zeros(b.shape[0], a.shape[1], dtype=torch.float64, device="cpu")
    for start in range(0, len(b), ROWS):
        rows, part = b[start : start + ROWS], made[start : start + ROWS]
        for k in range(len(a)):
            part.addcmul_(rows[:, k : k + 1], a[k : k + 1])
    return made


@dataclass(frozen=True)
class ScaledBias:
    """scale * the bias of B."""

    bias: Entry
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the bias."""
        return self.bias.shape

    def cells(self, box: Box) -> torch.Tensor:
        """In float64."""
        return self.bias.read(box).double().mul_(self.scale)


Added = Product | ScaledBias


def _deltas(adapter: Checkpoint, config: Config) -> tuple[dict[str, list[Added]], dict[str, Entry]]:
    """What is added to tensors of the base model, and what takes their place, by name."""
    parts, replaced = defaultdict[tuple[str, str], dict[str, Entry]](dict), dict[str, Entry]()
    for name, entry in adapter.items():
        if not name.startswith(PREFIX):
            raise CheckpointError(f"{adapter.path}: {name!r} does not begin with {PREFIX!r}, as tensors of peft do")
        found = PART.fullmatch(name.removeprefix(PREFIX))
        if found is None and ".lora_" in name:
            raise CheckpointError(f"{adapter.path}: {name!r} is not a part of a plain LoRA, such as lora_A.weight")
        if found is None:
            other = replaced.setdefault(name.removeprefix(PREFIX).replace(".base_layer.", "."), entry)
            if other is not entry:
                raise CheckpointError(f"{adapter.path}: {other.name!r} and {name!r} are for the same tensor")
        else:
            kind = found["embedding"] or ""
            parts[found["module"], kind][f"{found['part']}{(found['what'] or '').removesuffix('.weight')}"] = entry
    deltas = defaultdict[str, list[Added]](list)
    for (module, kind), pair in parts.items():
        for name, added in _of_module(adapter, config, module, kind, pair):
            deltas[name].append(added)
    return deltas, replaced


def _of_module(
    adapter: Checkpoint, config: Config, module: str, kind: str, pair: Mapping[str, Entry]
) -> list[tuple[str, Added]]:
    a, b = pair.get("A"), pair.get("B")
    if a is None or b is None or not pair.keys() <= {"A", "B", "B.bias"}:
        raise CheckpointError(f"{adapter.path}: {module!r} has {', '.join(f'lora_{kind}{one}' for one in pair)} only")
    for entry in pair.values():
        if entry.dtype not in PLAIN or entry.dtype == torch.float64:
            raise CheckpointError(f"{adapter.path}: {entry.name!r} is {entry.dtype}: only smaller floats are merged")
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise CheckpointError(
            f"{adapter.path}: {module!r} has A of shape {a.shape} and B of shape {b.shape}: only (rank, inputs) and "
            f"(outputs, rank) of a linear layer or an embedding are merged"
        )
    scale = _scale(config, module, a.shape[0], adapter)
    added: list[tuple[str, Added]] = [(f"{module}.weight", Product(a, b, scale, bool(kind)))]
    return added + [(f"{module}.bias", ScaledBias(one, scale)) for part, one in pair.items() if part == "B.bias"]


def _scale(config: Config, module: str, rank: int, adapter: Checkpoint) -> float:
    where = adapter.files.label(CONFIG)
    said = _by_pattern(config.get("rank_pattern"), module, config.get("r"), where)
    alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"), where)
    if said != rank:
        raise CheckpointError(f"{where} gives {module!r} the rank {brief(said)}, but its lora_A has {rank}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not isfinite(alpha) or not rank:
        raise CheckpointError(f"{where} gives {module!r} the alpha {brief(alpha)} and the rank {rank}")
    return alpha / sqrt(rank) if config.get("use_rslora") else alpha / rank


def _by_pattern(patterns: object, module: str, otherwise: object, where: object) -> object:
    """The value of the first pattern that fits the end of a module's name."""
    if patterns and not isinstance(patterns, Mapping):
        raise CheckpointError(f"{where}: {brief(patterns)} are not values by patterns of names")
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        plain = REPEATED.sub(r"\1", cast("str", pattern))
        if not SAFE_PATTERN.fullmatch(plain) or len(REPEATED.findall(pattern)) > 3:
            raise CheckpointError(f"{where}: the pattern {brief(pattern)} is not one of names, numbers and dots")
        try:
            fits = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise CheckpointError(f"{where}: the pattern {brief(pattern)} is invalid: {error}") from None
        if fits:
            return value
    return otherwise


# --- what they are added to -------------------------------------------------------------------------------------------


def _prefix(opened: Checkpoint, names: Sequence[str], adapter: Checkpoint) -> str:
    """What the names of the base model begin with, such as `model.` in a checkpoint of a training."""
    first, known = names[0] if names else "", set(opened)
    choices = sorted(
        (name.removesuffix(first) for name in opened if name == first or name.endswith(f".{first}")), key=len
    )
    fitting = [prefix for prefix in choices if all(f"{prefix}{name}" in known for name in names)]
    if len(fitting) > 1 and fitting[0]:
        raise CheckpointError(
            f"{opened.path} has several models that {adapter.path} fits, such as those below {fitting[0]!r} and "
            f"{fitting[1]!r}: convert one of them with select= first, and merge into that"
        )
    if fitting:
        return fitting[0]
    lacking = [name for name in names if name not in known]
    raise CheckpointError(missing(f"{opened.path} lacks what {adapter.path} is for:", lacking, opened))


def _merged(
    opened: Checkpoint, name: str, several: Sequence[Added], instead: Entry | None, adapter: Checkpoint
) -> Entry:
    base = opened[name]
    if base.dtype not in PLAIN:
        raise CheckpointError(
            f"{opened.path}: {name!r} is {base.dtype}, and cannot be merged with {adapter.path}. Remedy: convert it to "
            f"bfloat16 first, codes with --quantized auto"
        )
    tied = [other for other, one in opened.items() if other != name and one.shared == base.shared is not None]
    if tied:
        raise CheckpointError(f"{opened.path}: {name!r} is tied to {tied[0]!r}, and a merge would change one of them")
    oriented = [_oriented(one, base.shape, name, adapter) for one in several]
    if instead is not None and instead.shape != base.shape:
        raise CheckpointError(f"{adapter.path} has {name!r} of shape {instead.shape}, but {opened.path} {base.shape}")
    return MergedEntry(base, oriented, instead, adapter)


def _oriented(added: Added, shape: tuple[int, ...], name: str, adapter: Checkpoint) -> Added:
    """The weight of a layer that has its inputs first is added to as it lies; of a square one the config says it."""
    if added.shape == shape[::-1] != shape and isinstance(added, Product):
        added = Product(added.a, added.b, added.scale, not added.transposed)
    elif isinstance(added, Product) and shape[0] == shape[-1] and _inputs_first(adapter):
        added = Product(added.a, added.b, added.scale, True)
    if added.shape != shape:
        raise CheckpointError(f"{adapter.path} has a LoRA of shape {added.shape} for {name!r}, which has {shape}")
    return added


def _inputs_first(adapter: Checkpoint) -> bool:
    return bool(read_config(adapter.files, CONFIG).get("fan_in_fan_out"))


class MergedEntry(ComputedEntry):
    """A tensor with what adapters add to it."""

    def __init__(self, base: Entry, added: Sequence[Added], instead: Entry | None, adapter: Checkpoint) -> None:
        self.base, self.added, self.instead = base, added, instead
        stamp = [
            adapter.files.stamp(name) for name in sorted({path for one in adapter.values() for path in one.used()})
        ]
        scales = ", ".join(repr(one.scale) for one in added)
        dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
        made_by = f"merged with {adapter.path} ({scales}; {stamp})"
        super().__init__(base.name, base.shape, dtype, self._values, [base], made_by)

    @property
    def becomes(self) -> torch.dtype:
        """As the base model has it."""
        return self.base.dtype

    def check(self, boxes: Boxes | None) -> None:
        """Refuse cells that no file has."""
        (self.instead or self.base).check(boxes)

    def _values(self, box: Box) -> torch.Tensor:
        values = (self.instead or self.base).read(box).double()
        for one in self.added:
            values += one.cells(box)
        return values.to(self.dtype)
