"""What Megatron's `args` say of a model and of the ranks that saved it: nothing else in its files does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardwise.checkpoint.opaque import Opaque
from shardwise.errors import CheckpointError
from shardwise.quoting import brief

NEEDED = ("num_layers", "hidden_size", "num_attention_heads")


class MegatronArgs(NamedTuple):
    """The fields of `args`, and where they are, for messages."""

    fields: Mapping[str, object]
    where: str

    @staticmethod
    def of(args: object, where: str) -> MegatronArgs:
        """From the value of a checkpoint: an argparse.Namespace, which is not rebuilt."""
        state = args.state if isinstance(args, Opaque) else args if isinstance(args, Mapping) else None
        state = state if state is not None else getattr(args, "__dict__", None)
        if not isinstance(state, Mapping):
            found = "" if args is None else f", but {brief(args)}"
            raise CheckpointError(
                f"{where} has no 'args' with the arguments of Megatron{found}: heads, layers and parallel "
                f"sizes are not known without them. Remedy: save it with Megatron's own save_checkpoint"
            )
        return MegatronArgs({str(key): value for key, value in state.items()}, where)

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number; None counts as missing."""
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or (value < 0 and not isinstance(value, bool)):
            raise CheckpointError(f"{self.where}: args.{name} is {brief(value)}, but a whole number is needed")
        return int(value)

    def size(self, name: str) -> int:
        """A parallel size: 1 where it is missing."""
        return max(1, self.number(name, 1))

    def flag(self, name: str) -> bool:
        """True where it is there and set."""
        return bool(self.fields.get(name))

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers that rules may name, with those that Megatron computes where they are not given."""
        found = {name: self.number(name) for name in NEEDED}
        hidden, heads = found["hidden_size"], found["num_attention_heads"]
        groups = self.number("num_query_groups", heads) if self.flag("group_query_attention") else heads
        if not heads or not groups or heads % groups:
            raise CheckpointError(f"{self.where}: args have {heads} attention heads in {groups} query groups")
        ffn = self.number("ffn_hidden_size", 4 * hidden)
        more = {name: self.number(name) for name in ("padded_vocab_size", "num_experts") if self.fields.get(name)}
        return {
            **found,
            **more,
            "num_query_groups": groups,
            "kv_channels": self.number("kv_channels", hidden // heads),
            "ffn_hidden_size": ffn,
            "moe_ffn_hidden_size": self.number("moe_ffn_hidden_size", ffn),
            "gated": int(self.flag("swiglu") or self.flag("quick_geglu")),
        }

    @property
    def tied(self) -> bool:
        """True where the output layer is the embedding."""
        return not self.flag("untie_embeddings_and_output_weights")
