"""Meshes of owners with named axes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import prod

import numpy as np
import numpy.typing as npt

from shardwise.errors import LayoutError
from shardwise.geometry import Ints
from shardwise.layout.checks import counted, owner_array, refuse_repeats
from shardwise.layout.placements import Placement, placement
from shardwise.notation import MOST_AXES, NAME, NEXT_PLACEMENT
from shardwise.quoting import brief


class Mesh:
    """Owners in an array with named axes.

    `ranks` are the owners (by default 0, 1, 2, ...). `hosts` says where they live: a number of owners per host, or a
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
            given = NEXT_PLACEMENT.split(given)
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
