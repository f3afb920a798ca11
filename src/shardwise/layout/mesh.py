"""Meshes of owners with named axes, and the placements of a tensor on them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import LayoutError
from shardwise.geometry import Ints
from shardwise.layout.checks import counted, owner_array, refuse_repeats
from shardwise.notation import LONGEST, MOST_AXES, NAME, OPERATIONS, PLACEMENT
from shardwise.quoting import brief


@dataclass(frozen=True, slots=True)
class Shard:
    """Split dim `dim` over a mesh axis by torch.chunk's rule."""

    dim: int

    def __str__(self) -> str:
        return f"S{self.dim}"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """Split dim `dim` into `split_factor` chunks and each of these over a mesh axis (DTensor's `_StridedShard`)."""

    dim: int
    split_factor: int

    def __str__(self) -> str:
        return f"S{self.dim}:{self.split_factor}"


@dataclass(frozen=True, slots=True)
class Replicate:
    """The same on every owner of a mesh axis."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every owner of a mesh axis holds a term; `reduce_op` over the terms gives the value."""

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in OPERATIONS:
            near = get_close_matches(str(self.reduce_op), OPERATIONS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise LayoutError(f"no reduction {self.reduce_op!r}: use one of {', '.join(OPERATIONS)}{hint}")

    def __str__(self) -> str:
        return "P" if self.reduce_op == "sum" else f"P{self.reduce_op}"


Placement = Shard | StridedShard | Replicate | Partial


def placement(given: object) -> Placement:
    """A placement from its word ("S0", "S0:2", "R", "P", "Pmax"; also "S(0)", "P(max)"), from ours, or from torch's.

    >>> placement("Pmax"), placement("S(1)")
    (Partial(reduce_op='max'), Shard(dim=1))
    """
    if isinstance(given, Shard | StridedShard | Replicate | Partial):
        return given
    if isinstance(given, str):
        return _read(given)
    torchs: Any = given
    match type(given).__name__:  # torch's, exactly: a kind that we do not know must not pass for one that we do
        case "Shard":
            return Shard(int(torchs.dim))
        case "_StridedShard":
            return StridedShard(int(torchs.dim), int(torchs.split_factor))
        case "Replicate":
            return Replicate()
        case "Partial":
            return Partial(str(torchs.reduce_op))
    raise LayoutError(
        f"{brief(given)} is not a placement: use 'S0', 'R', 'P', or Shard(0), Replicate(), Partial('sum')"
    )


def _read(word: str) -> Placement:
    plain = word.strip().removeprefix("_").replace(", ", ":").replace("(", "").replace(")", "")
    short = len(plain) <= LONGEST
    match = PLACEMENT.fullmatch(plain) if short else None  # DTensor writes S(0), P(max) and _S(0, 2)
    if not match and plain[:1] == "P" and short:
        return Partial(plain[1:])  # which knows the reductions
    if not match:
        raise LayoutError(f"{brief(word)} is not a placement: use S0 (shard dim 0), S0:2 (strided), R, P or Pmax")
    if match["dim"] is None:
        return Replicate() if plain == "R" else Partial(match["op"] or "sum")
    return StridedShard(int(match["dim"]), int(match["factor"])) if match["factor"] else Shard(int(match["dim"]))


class Mesh:
    """Owners in an array with named axes.

    `ranks` are the owners (by default 0, 1, 2, ...); `hosts` says where they live: a number of owners per host, or a
    host for every owner in the order of `ranks`.

    >>> Mesh(fsdp=4, tp=2)
    Mesh(fsdp=4, tp=2)
    >>> Mesh(fsdp=2, tp=2, ranks=[8, 9, 12, 13]).ranks.tolist()
    [[8, 9], [12, 13]]
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: Ints
    hosts: Mapping[int, Hashable] | None

    def __init__(
        self, *, ranks: npt.ArrayLike | None = None, hosts: int | Sequence[Hashable] | None = None, **axes: int
    ) -> None:
        if len(axes) > MOST_AXES:
            raise LayoutError(f"a mesh of {len(axes)} axes is not supported: at most {MOST_AXES}")
        for name in axes:
            _check_name(name)
        sizes = tuple(counted(size, f"the size of mesh axis {name!r}") for name, size in axes.items())
        if any(name.isdigit() for name in axes) and tuple(axes) != tuple(map(str, range(len(axes)))):
            raise LayoutError(f"mesh axes {list(axes)} must all have names, or be numbered 0, 1, ...")
        if not axes:
            raise LayoutError("a mesh needs at least one axis, such as Mesh(tp=4); ranks= and hosts= are not axes")
        self.__dict__.update(names=tuple(axes), shape=sizes)
        flat = owner_array(prod(sizes) if ranks is None else _flattened(ranks))
        if len(flat) != prod(sizes):
            raise LayoutError(f"a mesh of {self._sizes()} has {prod(sizes)} owners, but ranks= lists {len(flat)}")
        refuse_repeats(flat, "a mesh")
        flat.flags.writeable = False
        places = None if hosts is None else _hosts(hosts, flat.tolist())
        self.__dict__.update(ranks=flat.reshape(sizes), hosts=places)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Mesh is frozen: {name!r} cannot be set")

    @staticmethod
    def of(shape: Sequence[int], names: Sequence[str] | None = None, ranks: npt.ArrayLike | None = None) -> Mesh:
        """A mesh of that shape; axes without names are called by their number.

        >>> Mesh.of((4, 2))
        Mesh(4x2)
        """
        try:
            called = list(names or map(str, range(len(shape))))
        except TypeError:
            raise LayoutError(f"a mesh needs a sequence of sizes, such as (4, 2), not {shape!r}") from None
        if len(called) != len(shape) or len(set(called)) != len(called):
            raise LayoutError(f"a mesh of {len(shape)} axes needs as many different names, not {called}")
        for name in called:
            _check_name(name)
        return Mesh(ranks=ranks, **dict(zip(called, shape, strict=True)))

    @property
    def named(self) -> bool:
        """True where the axes have names of their own."""
        return self.names != tuple(map(str, range(len(self.names))))

    def placements(self, given: object) -> tuple[Placement, ...]:
        """One placement per axis, from a sequence or from a mapping axis name -> placement (others replicate)."""
        if isinstance(given, Mapping):
            for name in given:
                if name not in self.names:
                    near = get_close_matches(str(name), self.names, 1)
                    hint = f"; did you mean {near[0]!r}?" if near else ""
                    raise LayoutError(f"no axis {name!r} in {self}: it has {', '.join(self.names)}{hint}")
            given = [given.get(name, "R") for name in self.names]
        if isinstance(given, str):
            given = given.split(",")
        if not isinstance(given, Iterable):
            raise LayoutError(f"placements must be a sequence, one per mesh axis, not {given!r}")
        placements = tuple(placement(p) for p in given)
        if len(placements) != len(self.shape):
            raise LayoutError(
                f"{self} has {len(self.shape)} axes, but {len(placements)} placements were given: one per axis"
            )
        return placements

    def _sizes(self) -> str:
        if self.named:
            return ", ".join(f"{n}={s}" for n, s in zip(self.names, self.shape, strict=True))
        return "x".join(map(str, self.shape))

    def __repr__(self) -> str:
        counting = bool((self.ranks.reshape(-1) == np.arange(self.ranks.size)).all())
        return f"Mesh({self._sizes()}{f', ranks={self.ranks.tolist()}' * (not counting)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        hosts = None if self.hosts is None else tuple(self.hosts.values())
        return self.names, self.shape, self.ranks.tobytes(), hosts


def _check_name(name: object) -> None:
    if name in ("ranks", "hosts", "self"):
        raise LayoutError(f"{name!r} is a reserved name: call the mesh axis something else")
    if not isinstance(name, str) or not (NAME.fullmatch(name) or (name.isascii() and name.isdigit())):
        raise LayoutError(f"{brief(name)} is not a valid axis name: use letters, digits and _, such as dp_shard")


def _flattened(ranks: npt.ArrayLike) -> npt.NDArray[np.generic]:
    try:
        return np.asarray(ranks).reshape(-1)
    except ValueError:
        raise LayoutError(f"ranks= must be an array of whole numbers, not {ranks!r}") from None


def _hosts(given: object, ranks: Sequence[int]) -> dict[int, Hashable]:
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        per_host = counted(given, "hosts= (owners per host)")
        return {rank: place // per_host for place, rank in enumerate(ranks)}
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise LayoutError(f"hosts= must be a number of owners per host or a list of hosts, not {given!r}")
    if len(given) != len(ranks):
        raise LayoutError(
            f"hosts= names {len(given)} hosts for {len(ranks)} owners: one per owner, or a number per host"
        )
    if not all(isinstance(host, Hashable) for host in given):
        raise LayoutError(f"hosts must be names or numbers, not {list(given)!r}")
    return dict(zip(ranks, given, strict=True))
