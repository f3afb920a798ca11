"""Nested arguments as leaves with their paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch.utils._pytree import keystr, tree_flatten_with_path


def argument_leaves(args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The leaves of a call's arguments, and where each is.

    >>> list(argument_leaves([5, [6]], {"mask": 7}))
    [('[0]', 5), ('[1][0]', 6), ("['mask']", 7)]
    """
    for path, leaf in tree_flatten_with_path((args, kwargs))[0]:
        yield keystr(path[1:]), leaf
