"""Models of Megatron under the names of Hugging Face, and the other way: rules for `remap=`.

One list of rules for each family of models says both directions. A rule counts only where the checkpoint has what it
takes, since Megatron names the same tensor in several ways: by its module or by the one that it is fused into, with
layers and experts stacked or one by one. What no rule takes is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypedDict

from shardwise.checkpoint.entry import Checkpoint
from shardwise.checkpoint.megatron_args import MegatronArgs
from shardwise.checkpoint.model_config import CONFIG, Config, config_numbers, read_config
from shardwise.checkpoint.opening import open
from shardwise.errors import CheckpointError
from shardwise.job.remap import Concat, Interleaved, Remap, Stack, Transposed
from shardwise.job.remap_rules import Joining, NamedParts
from shardwise.quoting import brief
from shardwise.storage.paths import PathLike

Numbers = Mapping[str, int]
NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
LAYERS, FIRST_LAYER = "decoder.layers.", "decoder.layers.0."
NOT_WEIGHTS = ("optimizer.", "chained_")  # how the names of optimizer states begin
STYLES = ("hf", "megatron")
FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "mixtral": "mixtral",
    "gpt2": "gpt2",
}
UNLIKE = {  # arguments under which weights mean something else in Hugging Face's models
    "rotary_interleaved": "rotary cells lie in pairs",
    "apply_layernorm_1p": "weights of norms lack 1",
}


class Translation(TypedDict):
    """Keyword arguments of `convert` and `verify`."""

    remap: list[Remap]
    select: list[str] | None


def translation(source: PathLike | Checkpoint, to: str) -> Translation:
    """Options of `convert` and `verify` that give a model the names and the form of another framework.

    `to`: "hf", from a checkpoint of Megatron, whose `args` say which model it is; or "megatron", from Hugging Face's
    files with their config.json. Llama (Mistral, Qwen2, Qwen3), Mixtral and GPT-2. Optimizer states are left out.
    """
    if to not in STYLES:
        raise ValueError(f"the names must be those of 'hf' or 'megatron', not {to!r}")
    opened = source if isinstance(source, Checkpoint) else open(source)
    names = [name for name in opened if not name.startswith(NOT_WEIGHTS)]
    steps = _from_megatron(opened, names) if to == "hf" else _from_hf(opened, names)
    some = (
        None if len(names) == len(opened) else [f"{top}*" for top in dict.fromkeys(n.partition(".")[0] for n in names)]
    )
    return {"remap": steps, "select": some}


def _from_megatron(opened: Checkpoint, names: Iterable[str]) -> list[Remap]:
    args = MegatronArgs.of(opened.objects.get("args"), opened.path)
    numbers, kinds = args.numbers, set(map(kind_of, names))
    for flag, why in UNLIKE.items():
        if args.flag(flag):
            raise CheckpointError(f"{args.where}: args.{flag} is set: {why}, which no model of Hugging Face has")
    learned = args.fields.get("position_embedding_type") == "learned_absolute"
    if not numbers["gated"] and not learned:
        raise CheckpointError(
            f"{args.where}: args say neither swiglu (Llama, Mixtral) nor learned_absolute as position_embedding_type "
            f"(GPT-2)"
        )
    family = "gpt2" if not numbers["gated"] else "mixtral" if "num_experts" in numbers else "llama"
    stacks = [_stack(kind) for kind in sorted(kinds) if kind.startswith(LAYERS) and kind == _stacked(kind)]
    steps = [*(Step(rule) for rule in stacks), *MODELS[family](numbers)]
    return _used(opened, steps, kinds, f"Hugging Face's {family}")


def _from_hf(opened: Checkpoint, names: Iterable[str]) -> list[Remap]:
    if not opened.files.has(CONFIG):
        raise CheckpointError(f"{opened.files.label(CONFIG)} is missing: it says how many heads the model has")
    config, kinds = read_config(opened.files), set(map(kind_of, names))
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        kind, known = brief(config.get("model_type")), ", ".join(FAMILIES)
        raise CheckpointError(
            f"{opened.files.label(CONFIG)}: model_type {kind} has no rules for Megatron: {known} have"
        )
    if family == "gpt2" and not any(kind.startswith("transformer.") for kind in kinds):
        raise CheckpointError(
            f"{opened.path} has GPT-2 without 'transformer.' before its names. Remedy: first convert it with "
            f"rename={{'*': 'transformer.*'}}"
        )
    steps = [step.turned() for step in reversed(MODELS[family](_numbers(config)))]
    rules = _used(opened, steps, kinds, "Megatron")
    wholes = [kind_of(rule.whole) for rule in rules if isinstance(rule, Joining)]
    made = [whole for whole in wholes if whole.startswith(FIRST_LAYER) and ".local_experts." not in whole]
    return [*rules, *map(_stack, map(_stacked, made))]


def _numbers(config: Config) -> Numbers:
    """The numbers of a config.json, under the names that Megatron has for them."""
    numbers = config_numbers(config)
    heads = numbers.get("num_attention_heads", numbers.get("n_head", 0))
    hidden = numbers.get("hidden_size", numbers.get("n_embd", 0))
    groups = numbers.get("num_key_value_heads", heads)
    if min(heads, hidden, groups) < 1 or heads % groups:
        raise CheckpointError(f"{CONFIG} has {heads} attention heads in {groups} groups, and a hidden size of {hidden}")
    head = numbers.get("head_dim", hidden // heads)
    return {"num_attention_heads": heads, "num_query_groups": groups, "kv_channels": head}


# --- which rules count ------------------------------------------------------------------------------------------------


def kind_of(name: str) -> str:
    """A name, or the pattern of names, with 0 for every number: tensors of all layers and experts are of one kind.

    >>> kind_of("decoder.layers.12.mlp.linear_fc1.weight"), kind_of("model.layers.*.mlp.up_proj.weight")
    ('decoder.layers.0.mlp.linear_fc1.weight', 'model.layers.0.mlp.up_proj.weight')
    """
    return NUMBER.sub("0", name.replace("*", "0").replace("{}", "0"))


def _stacked(kind: str) -> str:
    """The name of a kind of layers where all are one tensor."""
    return kind.replace(FIRST_LAYER, LAYERS)


def _stack(stacked: str) -> Stack:
    return Stack(stacked, stacked.replace(LAYERS, f"{LAYERS}{{}}."))


class Step(NamedTuple):
    """A rule on the way from Megatron to Hugging Face. `joins`: it makes one tensor of several."""

    rule: Remap
    joins: bool = False

    def turned(self) -> Step:
        """On the way back."""
        return self._replace(joins=not self.joins)

    def ends(self) -> tuple[set[str], set[str]]:
        """The kinds of tensors that it takes, and those that it makes."""
        if not isinstance(self.rule, Joining):
            return {kind_of(self.rule.name)}, {kind_of(self.rule.name)}
        parts = self.rule.parts if isinstance(self.rule, NamedParts) else [self.rule.part]
        ends = {kind_of(self.rule.whole)}, {kind_of(part) for part in parts}
        return (ends[1], ends[0]) if self.joins else ends


def _used(opened: Checkpoint, steps: Iterable[Step], kinds: set[str], what: str) -> list[Remap]:
    """The rules that find what they take. What none takes is refused."""
    left, rules = set(kinds), list[Remap]()
    for step in steps:
        taken, made = step.ends()
        if taken <= left:
            left = (left - taken) | made
            rules.append(step.rule)
    unknown = sorted(left & kinds)
    if unknown or not rules:
        name = next((name for name in opened if kind_of(name) in unknown), "it")
        raise CheckpointError(
            f"{opened.path}: {name!r} has no name in {what} that is known here: write rules for it with rename= and "
            f"remap=, or leave it out"
        )
    return rules


# --- the families -----------------------------------------------------------------------------------------------------

MEGATRON = f"{LAYERS}*."


def _renamed(megatron: str, hf: str, pairs: Mapping[str, str]) -> list[Step]:
    """Tensors that only have other names."""
    return [Step(Concat(f"{megatron}{one}", [f"{hf}{other}"])) for one, other in pairs.items()]


def _qkv(numbers: Numbers, kind: str, parts: list[str]) -> Step:
    """q, k and v of every query group."""
    head, groups = numbers["kv_channels"], numbers["num_query_groups"]
    sizes = [numbers["num_attention_heads"] // groups * head, head, head]
    return Step(Interleaved(f"{MEGATRON}self_attention.linear_qkv.{kind}", [f"{part}.{kind}" for part in parts], sizes))


def _decoder(numbers: Numbers) -> list[Step]:
    """What Llama and Mixtral have in common."""
    hf = "model.layers.*."
    top = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    attention = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    }
    parts = [f"{hf}self_attn.{one}_proj" for one in "qkv"]
    qkv = [_qkv(numbers, kind, parts) for kind in ("weight", "bias")]
    return [*_renamed("", "", top), *_renamed(MEGATRON, hf, attention), *qkv]


def _llama(numbers: Numbers) -> list[Step]:
    hf = "model.layers.*."
    mlp = {
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "mlp.linear_fc1.weight_w": "mlp.gate_proj.weight",  # where Megatron saves both halves apart
        "mlp.linear_fc1.weight_v": "mlp.up_proj.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        "mlp.linear_fc2.bias": "mlp.down_proj.bias",
    }
    halves = [
        Step(Concat(f"{MEGATRON}mlp.linear_fc1.{kind}", [f"{hf}mlp.{one}_proj.{kind}" for one in ("gate", "up")]))
        for kind in ("weight", "bias")
    ]
    return [*_decoder(numbers), *_renamed(MEGATRON, hf, mlp), *halves]


def _mixtral(numbers: Numbers) -> list[Step]:
    hf = "model.layers.*."
    mlp = {
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.router.weight": "block_sparse_moe.gate.weight",
    }
    stacks = [
        Step(Stack(f"{MEGATRON}mlp.experts.experts.{kind}", f"{MEGATRON}mlp.experts.local_experts.{{}}.{kind}"))
        for kind in ("linear_fc1.weight", "linear_fc2.weight")
    ]
    experts = [
        step for where in ("experts.", "local_experts.") for step in _experts(f"{MEGATRON}mlp.experts.{where}*.")
    ]
    return [*_decoder(numbers), *_renamed(MEGATRON, hf, mlp), *stacks, *experts]


def _experts(megatron: str) -> list[Step]:
    """The weights of an expert; the halves of the first one may be apart."""
    hf = "model.layers.*.block_sparse_moe.experts.*."
    names = {
        "linear_fc1.weight_w": "w1.weight",
        "linear_fc1.weight_v": "w3.weight",
        "linear_fc2.weight": "w2.weight",
    }
    halves = Step(Concat(f"{megatron}linear_fc1.weight", [f"{hf}w1.weight", f"{hf}w3.weight"]))
    return [*_renamed(megatron, hf, names), halves]


def _gpt2(numbers: Numbers) -> list[Step]:
    hf, both = "transformer.h.*.", ("weight", "bias")
    top = {
        "embedding.word_embeddings.weight": "transformer.wte.weight",
        "embedding.position_embeddings.weight": "transformer.wpe.weight",
        "output_layer.weight": "lm_head.weight",
        **{f"decoder.final_layernorm.{kind}": f"transformer.ln_f.{kind}" for kind in both},
    }
    norms = {
        **{f"input_layernorm.{kind}": f"ln_1.{kind}" for kind in both},
        **{f"self_attention.linear_qkv.layer_norm_{kind}": f"ln_1.{kind}" for kind in both},
        **{f"pre_mlp_layernorm.{kind}": f"ln_2.{kind}" for kind in both},
        **{f"mlp.linear_fc1.layer_norm_{kind}": f"ln_2.{kind}" for kind in both},
    }
    linear = {"self_attention.linear_proj": "attn.c_proj", "mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"}
    several = {f"{one}.{kind}": f"{other}.{kind}" for one, other in linear.items() for kind in both}
    parts = [f"{hf}attn.{one}" for one in "qkv"]  # which no side has
    fused = [
        step
        for kind in both
        for step in (
            _qkv(numbers, kind, parts),
            Step(Concat(f"{hf}attn.c_attn.{kind}", [f"{part}.{kind}" for part in parts]), joins=True),
        )
    ]
    turned = [Step(Transposed(f"{hf}{name}.weight")) for name in ("attn.c_attn", *linear.values())]
    return [*_renamed("", "", top), *_renamed(MEGATRON, hf, norms | several), *fused, *turned]


MODELS: Mapping[str, Callable[[Numbers], list[Step]]] = {"llama": _llama, "mixtral": _mixtral, "gpt2": _gpt2}
