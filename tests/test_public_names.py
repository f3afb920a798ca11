"""The public names are the ones in `__all__`, no more and no fewer, and each says what it is."""

from types import ModuleType

import pytest

import shardwise


def test_all_is_sorted_and_exact():
    public = [name for name in dir(shardwise) if not name.startswith("_")]
    assert shardwise.__all__ == sorted(n for n in public if not isinstance(getattr(shardwise, n), ModuleType))


@pytest.mark.parametrize("name", shardwise.__all__)
def test_has_a_docstring(name):
    doc = getattr(shardwise, name).__doc__
    assert doc
    assert not doc.startswith(f"{name}("), "a dataclass without a docstring gets its signature as one"
