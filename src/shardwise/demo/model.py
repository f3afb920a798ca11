"""What all acts share: the weights of a Llama, and how trainers and servers hold them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardwise.checkpoint import read_rules
from shardwise.job.plan import ModelPlan, TensorInfo
from shardwise.job.remap import Concat, links
from shardwise.layout import Layout, Mesh

DTYPE = torch.bfloat16
TRAINERS, SERVERS = Mesh(fsdp=4), Mesh(tp=2, ranks=[4, 5])
RENAME = {"model.*": "*"}  # a trainer saves {"model": weights, ...}: that is the prefix which others do without
FUSED = "qkv_proj"
FUSE = Concat(f"*.{FUSED}.weight", [f"*.{part}_proj.weight" for part in "qkv"])  # as servers have them
TENSOR_PARALLEL = read_rules("llama")

Weights = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Llama:
    """Its sizes; the tensors have the names of Hugging Face."""

    hidden: int = 512
    heads_kv: int = 256  # the rows of k and of v
    inner: int = 1408
    words: int = 8192
    layers: int = 8

    def shapes(self) -> Shapes:
        """The shapes of all weights."""
        shapes: Shapes = {"model.embed_tokens.weight": (self.words, self.hidden)}
        for n in range(self.layers):
            shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in self._layer().items()}
        return shapes | {"model.norm.weight": (self.hidden,), "lm_head.weight": (self.words, self.hidden)}

    def _layer(self) -> Shapes:
        rows = {"q": self.hidden, "k": self.heads_kv, "v": self.heads_kv, "o": self.hidden}
        return {
            "input_layernorm": (self.hidden,),
            **{f"self_attn.{name}_proj": (length, self.hidden) for name, length in rows.items()},
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
        }

    @property
    def segments(self) -> tuple[int, int, int]:
        """The rows of q, k and v where they are one tensor."""
        return self.hidden, self.heads_kv, self.heads_kv

    @property
    def bytes(self) -> int:
        """The bytes of all weights, once."""
        return sum(map(prod, self.shapes().values())) * DTYPE.itemsize

    def weights(self) -> Weights:
        """Random ones, the same every time."""
        source = torch.Generator().manual_seed(0)
        return {name: torch.randn(shape, generator=source).to(DTYPE) for name, shape in self.shapes().items()}


LLAMA_8B = Llama(hidden=4096, heads_kv=1024, inner=14336, words=128256, layers=32)


def fused(weights: Weights) -> Weights:
    """As servers have them: q, k and v of a layer are one."""
    result = Weights()
    for name, weight in weights.items():
        if ".q_proj." in name:
            parts = [weights[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            result[name.replace("q_proj", FUSED)] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            result[name] = weight
    return result


def trained(shapes: Shapes, trainers: Mesh = TRAINERS) -> dict[str, Layout]:
    """Fully sharded: the rows of every tensor over all trainers."""
    return {name: Layout.on_mesh(shape, trainers, ["S0"]) for name, shape in shapes.items()}


def served(llama: Llama, servers: Mesh = SERVERS) -> dict[str, Layout]:
    """Tensor parallel; every server has a part of q, of k and of v in one tensor."""
    rules, ranks = replace(TENSOR_PARALLEL, mesh=servers), servers.ranks.reshape(-1).tolist()
    layouts = dict[str, Layout]()
    for name, shape in llama.shapes().items():
        if ".q_proj." in name:
            whole = (sum(llama.segments), llama.hidden)
            layouts[name.replace("q_proj", FUSED)] = Layout.fused(whole, 0, llama.segments, ranks)
        elif ".k_proj." not in name and ".v_proj." not in name:
            layouts[name] = rules.layout(name, shape)
    return layouts


def planned(llama: Llama, trainers: Mesh = TRAINERS, servers: Mesh = SERVERS) -> ModelPlan:
    """The plan of the whole move: the one that a Resharder of these ranks comes to, without any rank."""
    sides = [
        {name: TensorInfo(layout.shape, DTYPE, layout, "cpu") for name, layout in layouts.items()}
        for layouts in (trained(llama.shapes(), trainers), served(llama, servers))
    ]
    shapes = ({name: tensor.shape for name, tensor in side.items()} for side in sides)
    return ModelPlan.of(links(*shapes, remap=[FUSE]), *sides)


def fsdp_model(weights: Weights, mesh: DeviceMesh) -> nn.Module:
    """A module with these weights, fully sharded by torch, layer by layer."""
    root = nn.Module()
    for name, weight in weights.items():
        at, *path = root, *name.split(".")[:-1]
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.register_parameter("weight", nn.Parameter(weight.clone(), requires_grad=False))
    for layer in root.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    return root
