"""What prepares a job whose pulls are deltas wherever they can be: between all ranks, also of few cells."""

from numbered import Derived

from shardwise.exchange import delta_blocks, exchange
from shardwise.publishing.orders import Order


def between_all_ranks(me):
    """Between hosts that a test pretends, too."""
    Order.delta = property(lambda order: False if order.base is None else "always")


def of_few_cells(me):
    """Every message, in several blocks and segments."""
    between_all_ranks(me)
    delta_blocks.BLOCK, delta_blocks.SEGMENT = 16, 100
    exchange.SMALLEST, exchange.INLINE = 1, 0


class Filled(Derived):
    """A trainer's part of a model that is known at every step."""

    def fill(self, step):
        """Write a step into all cells; garbage, if it is none."""
        for name, shards in self.shards.items():
            for at, shard in enumerate(shards):
                if step in self.steps:
                    shard.copy_(self._expected[step][name][at])
                else:
                    shard.fill_(-1)
