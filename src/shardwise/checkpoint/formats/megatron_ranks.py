"""Megatron's files of ranks: `mp_rank_XX[_PPP][_EEE]/model_optim_rng.pt`, opened as whole tensors by global names.

The ranks, heads and sizes are those of `args`, which every file has. Layers are numbered from 0 in every pipeline stage
(and in every part of it, where the pipeline is interleaved): here they get their numbers in the model. Old names
(`language_model.encoder`) become those of Megatron core, so that one set of rules says what is split (`megatron.toml`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from shardwise.checkpoint.entry import Checkpoint, Entry
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.formats import torch_save
from shardwise.checkpoint.formats.rank_files import MAX_MISSING, join_ranks, same_sample
from shardwise.checkpoint.megatron_args import MegatronArgs
from shardwise.checkpoint.rules import Rules, read_rules
from shardwise.errors import CheckpointError, LayoutError
from shardwise.job.names import missing, some
from shardwise.quoting import brief

FILE = re.compile(r"(mp_rank_[0-9]+(?:_[0-9]+){0,2})/(model_optim_rng\.pt|model_rng\.pt)")
STEP = re.compile(r"iter_([0-9]{1,18})")
FIRST = [
    f"mp_rank_00{more}/{file}" for file in ("model_optim_rng.pt", "model_rng.pt") for more in ("", "_000", "_000_000")
]
PART = re.compile(r"(model[0-9]{0,9})\.(.*)", re.DOTALL)
LAYER = re.compile(r"(.*?\blayers\.)([0-9]{1,9})\.(.*)", re.DOTALL)
EXPERT = re.compile(r"(.*\.experts\.local_experts\.)([0-9]{1,9})\.(.*)", re.DOTALL)
GROUPED = re.compile(r"(.*\.experts\.)(linear_fc[12]\.)(weight|bias)([0-9]{1,9})", re.DOTALL)
OLD_NAMES = [
    (re.compile(old), new)
    for old, new in {
        r"^(word_embeddings_for_head|language_model\.output_layer)\.": "output_layer.",
        r"^language_model\.embedding\.": "embedding.",
        r"^language_model\.(encoder|transformer)\.final_(layer)?norm\.": "decoder.final_layernorm.",
        r"^language_model\.(encoder|transformer)\.": "decoder.",
        r"\.(self_)?attention\.query_key_value\.": ".self_attention.linear_qkv.",
        r"\.(self_)?attention\.dense\.": ".self_attention.linear_proj.",
        r"\.mlp\.dense_h_to_4h\.": ".mlp.linear_fc1.",
        r"\.mlp\.dense_4h_to_h\.": ".mlp.linear_fc2.",
        r"\.input_norm\.": ".input_layernorm.",
        r"\.post_attention_(layer)?norm\.": ".pre_mlp_layernorm.",
    }.items()
]
HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
SAME = (  # arguments that all files must agree on
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "swiglu", "padded_vocab_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
)
OF_ONE_RANK = ("model", "optimizer", "rng_state")  # values that differ from rank to rank


class Grid(NamedTuple):
    """The sizes of tensor, pipeline and expert parallelism."""

    tp: int
    pp: int
    ep: int

    @staticmethod
    def of(args: MegatronArgs) -> Grid:
        """By the arguments."""
        grid = Grid(*map(args.size, SAME[-3:]))
        experts = args.number("expert_tensor_parallel_size", grid.tp)
        if grid.ep > 1 and experts != grid.tp:
            raise CheckpointError(
                f"{args.where}: args.expert_tensor_parallel_size is {experts}, but tensor_model_parallel_size is "
                f"{grid.tp}: only equal ones are read. Remedy: save it as torch_dist (--ckpt-format torch_dist)"
            )
        return grid

    def folder(self, tp: int, pp: int, ep: int) -> str:
        """The folder of a rank."""
        stage, expert = f"_{pp:03d}" * (self.pp > 1), f"_{ep:03d}" * (self.ep > 1)
        return f"mp_rank_{tp:02d}{stage}{expert}"

    def folders(self) -> list[str]:
        """Those of all ranks."""
        return [self.folder(*rank) for rank in product(*map(range, self))]

    def stage(self, pp: int) -> list[str]:
        """Those of a pipeline stage, in the order of its mesh."""
        return [self.folder(tp, pp, ep) for tp in range(self.tp) for ep in range(self.ep)]


class RankFile(NamedTuple):
    """An opened file, and the tensors of each part of the model in it, by the names of Megatron core."""

    name: str
    opened: Checkpoint
    args: MegatronArgs
    parts: Mapping[int, Mapping[str, Entry]]

    @staticmethod
    def of(files: Files, name: str) -> RankFile:
        """Open it."""
        opened, where = torch_save.open_files(files, [name]), str(files.label(name))
        parts = dict[int, dict[str, Entry]]()
        for full, entry in opened.items():
            match = PART.fullmatch(full)
            if match is not None:
                parts.setdefault(int(match[1].removeprefix("model") or 0), {})[_new_name(match[2])] = entry
        _check_version(opened.objects.get("checkpoint_version", 0), where)
        return RankFile(name, opened, MegatronArgs.of(opened.objects.get("args"), where), parts)

    @property
    def iteration(self) -> object:
        """Of the training."""
        return self.opened.objects.get("iteration")


def _check_version(version: object, where: str) -> None:
    """Refuse rows of q, k and v in an order of old. Megatron takes files without a version to be of version 0."""
    if not isinstance(version, float | int) or version < 2:
        raise CheckpointError(
            f"{where}: checkpoint_version {brief(version)} orders rows of q, k and v in another way. Remedy: load it "
            f"in Megatron, which reorders them, and save it again"
        )


def _new_name(name: str) -> str:
    """The name that Megatron core has for it."""
    for old, new in OLD_NAMES:
        name = old.sub(new, name)
    grouped = GROUPED.fullmatch(name)
    return name if grouped is None else "{0}local_experts.{3}.{1}{2}".format(*grouped.groups())


def holds_rank_files(files: Files) -> bool:
    """True for a folder of one iteration."""
    named = STEP.fullmatch(files.root.rstrip("/").rpartition("/")[2]) is not None
    return any(map(files.has, FIRST)) or (named and any(map(FILE.fullmatch, files.names(recursive=True))))


def open_megatron_ranks(files: Files) -> Checkpoint:
    """The tensors of all files together; other values are those of the first rank."""
    there = {match[1]: name for name in files.names(recursive=True) if (match := FILE.fullmatch(name))}
    first = RankFile.of(files, there[min(there)])
    grid = Grid.of(first.args)
    _check_folders(files, there, grid, first)
    others = {folder: there[folder] for folder in grid.folders() if there[folder] != first.name}
    ranks = {grid.folder(0, 0, 0): first} | {folder: RankFile.of(files, name) for folder, name in others.items()}
    _check_alike(files, first, ranks.values())
    model = Model(files, grid, ranks, first.args)
    return Checkpoint(files, "megatron-ranks", model.tensors(), objects=lambda: _values(first.opened))


def _values(first: Checkpoint) -> dict[str, object]:
    kept = {name: value for name, value in first.objects.items() if not name.startswith(OF_ONE_RANK)}
    return {name: value for name, value in kept.items() if PART.fullmatch(name) is None}


def _check_folders(files: Files, there: Mapping[str, str], grid: Grid, first: RankFile) -> None:
    """Refuse missing ranks, and those of another save."""
    if prod(grid) > len(there) + MAX_MISSING:
        raise CheckpointError(f"{files.root}: args of {first.name} say {prod(grid)} ranks, but there are {len(there)}")
    expected = grid.folders()
    says = f"args of {first.name} say tensor {grid.tp} x pipeline {grid.pp} x expert {grid.ep} parallel ranks"
    absent, more = [one for one in expected if one not in there], sorted({*there} - {*expected})
    if absent:
        raise CheckpointError(missing(f"{files.root}: {says}, but these are missing:", absent, there))
    if more:
        raise CheckpointError(f"{files.root}: {says}, but there are {some(more)} too: are these of another save?")


def _check_alike(files: Files, first: RankFile, ranks: Iterable[RankFile]) -> None:
    """Refuse files of different iterations or models."""
    step = STEP.fullmatch(files.root.rstrip("/").rpartition("/")[2])
    if step is not None and isinstance(first.iteration, int) and int(step[1]) != first.iteration:
        raise CheckpointError(f"{files.label(first.name)} is of iteration {first.iteration}: it is in another folder")
    for rank in ranks:
        pairs = {f"args.{name}": (first.args.fields.get(name), rank.args.fields.get(name)) for name in SAME}
        for what, (one, other) in {**pairs, "iteration": (first.iteration, rank.iteration)}.items():
            if one != other:
                raise CheckpointError(
                    f"{files.root}: {what} is {brief(one)} in {first.name}, but {brief(other)} in {rank.name}: "
                    f"the files are of different saves"
                )


class Model:
    """The tensors of a model, from the files of all its ranks."""

    def __init__(self, files: Files, grid: Grid, ranks: Mapping[str, RankFile], args: MegatronArgs) -> None:
        self._files, self._grid, self._ranks, self._args = files, grid, ranks, args

    def tensors(self) -> dict[str, Entry]:
        """The whole tensors, by their names in the model."""
        found = dict[str, Entry]()
        for stage, part in product(range(self._grid.pp), self._parts):
            tensors = self._joined(stage, part)
            tied = tensors.pop(HEAD, None) if self._args.tied else None
            if tied is not None:
                self._check_tied(tied, {**tensors, **found}.get(EMBEDDING))
            twice = sorted({*found} & {*tensors})
            if twice:
                raise CheckpointError(f"{self._files.root}: {twice[0]!r} is in two pipeline stages")
            found |= tensors
        self._check_shapes(found)
        return found

    @cached_property
    def _parts(self) -> list[int]:
        """The parts of every stage."""
        several = [*self._ranks.values()]
        for rank in several:
            if sorted(rank.parts) != sorted(several[0].parts):
                raise CheckpointError(
                    f"{self._files.root}: {several[0].name} has {len(several[0].parts)} parts of the model, but "
                    f"{rank.name} has {len(rank.parts)}"
                )
        if not several[0].parts:
            raise CheckpointError(f"{self._files.label(several[0].name)} has no tensors below 'model'")
        return sorted(several[0].parts)

    def _joined(self, stage: int, part: int) -> dict[str, Entry]:
        """The tensors of a part of a stage, under their names in the model."""
        folders, number = self._grid.stage(stage), self._grid.ep
        named = [
            {self._name(name, stage, part, at % number): entry for name, entry in self._tensors(folder, part).items()}
            for at, folder in enumerate(folders)
        ]
        try:
            return join_ranks(named, [self._ranks[folder].name for folder in folders], self._files, self._rules)
        except LayoutError as error:
            raise CheckpointError(f"{self._files.root}: {error}") from None

    def _tensors(self, folder: str, part: int) -> dict[str, Entry]:
        """Those that the rules do not leave out."""
        tensors = self._ranks[folder].parts[part]
        return {name: entry for name, entry in tensors.items() if not self._rules.skips(name)}

    @cached_property
    def _rules(self) -> Rules:
        sizes = {"tp": self._grid.tp, "ep": self._grid.ep}
        try:
            rules = read_rules("megatron").with_mesh(**sizes if self._grid.ep > 1 else {"tp": self._grid.tp})
            return rules.with_config(self._args.numbers, self._args.where)
        except LayoutError as error:
            raise CheckpointError(f"{self._args.where}: {error}") from None

    def _name(self, name: str, stage: int, part: int, expert_rank: int) -> str:
        """With the numbers of its layer and expert in the model."""
        expert = EXPERT.fullmatch(name)
        if expert is not None:
            count = self._args.number("num_experts") // self._grid.ep
            name = f"{expert[1]}{int(expert[2]) + expert_rank * count}.{expert[3]}"
        layer = LAYER.fullmatch(name)
        if layer is None:
            return name
        return f"{layer[1]}{int(layer[2]) + self._before[stage, part, layer[1]]}.{layer[3]}"

    @cached_property
    def _before(self) -> Counter[tuple[int, int, str]]:
        """How many layers of a kind come before those of a part of a stage: parts go through all stages in turn."""
        before, total = Counter[tuple[int, int, str]](), Counter[str]()
        for part, stage in product(self._parts, range(self._grid.pp)):
            tensors = self._tensors(self._grid.folder(0, stage, 0), part)
            layers = {(match[1], int(match[2])) for name in tensors if (match := LAYER.fullmatch(name))}
            for kind in {kind for kind, _ in layers}:
                numbers = sorted(number for one, number in layers if one == kind)
                if numbers != [*range(len(numbers))]:
                    self._refuse_layers(self._grid.folder(0, stage, 0), kind, numbers)
                before[stage, part, kind] = total[kind]
                total[kind] += len(numbers)
        expected, count = self._args.number("num_layers"), total["decoder.layers."]
        if count != expected and not total["encoder.layers."]:
            raise CheckpointError(
                f"{self._files.root}: args.num_layers is {expected}, but the files have {count} layers"
            )
        return before

    def _refuse_layers(self, folder: str, kind: str, numbers: Sequence[int]) -> None:
        raise CheckpointError(
            f"{self._files.label(self._ranks[folder].name)} has layers {some(map(str, numbers))} as {kind!r}, but in "
            f"a file they are numbered from 0"
        )

    def _check_tied(self, head: Entry, embedding: Entry | None) -> None:
        """Refuse an output layer that is not the embedding, though `args` say so: the first cells are compared."""
        if embedding is None or head.shape != embedding.shape or not same_sample(head, embedding):
            raise CheckpointError(
                f"{self._files.root}: args say that {HEAD!r} is {EMBEDDING!r} "
                f"(untie_embeddings_and_output_weights is not set), but they differ"
            )

    def _check_shapes(self, tensors: Mapping[str, Entry]) -> None:
        try:
            self._rules.check({name: entry.shape for name, entry in tensors.items()})
        except LayoutError as error:
            raise CheckpointError(f"{self._args.where}: {error}") from None
