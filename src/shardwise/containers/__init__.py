"""Containers of sharded tensors: ours, DTensor and torch's ShardedTensor, taken apart and put together."""
