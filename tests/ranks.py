"""The fixture `ranks(n, fn)`: `fn(rank)` on n forked processes with a gloo group between them."""

import pytest

from shardwise.testing import on_ranks


@pytest.fixture
def ranks():
    """See `shardwise.testing.on_ranks`."""
    return on_ranks
