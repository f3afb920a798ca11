"""Rules: patterns of names, and where the tensors with such names lie on a mesh. A TOML file, or a built-in one.

    base = "llama"              # built-in rules to add to: the rules of this file come first

    [mesh]                      # names and sizes of the axes, in order; may be left out and given by `with_mesh`
    tp = 2

    [[rule]]                    # the first matching rule wins; * ? [abc] as in shells
    name = ["*.[qkv]_proj.weight", "*.gate_proj.weight"]    # a pattern, or several
    placements = {tp = "S0"}    # by axis, others replicate; or one per axis, ["S0"]; or "R": replicated on all

    [[rule]]
    name = "*.k_proj.weight"
    placements = {tp = "S0"}
    heads = "num_key_value_heads"   # so many heads: none is cut
    repeat = true               # with more ranks than heads, each head lies on several ranks

    [[rule]]
    name = "*.qkv_proj.weight"
    fused = {dim = 0, segments = [4096, 1024, 1024]}        # q|k|v: every segment is split over the axis

    [[rule]]
    name = "*.gate_up_proj.weight"
    fused = {dim = 0, ratio = [1, 1], axis = "tp"}          # of any size; `axis` where the mesh has several

    [[rule]]                    # by numbers of heads; of a segment with fewer heads than ranks, heads are replicated
    name = "*.qkv_proj.bias"
    fused = {dim = 0, heads = ["num_attention_heads", "num_key_value_heads", "num_key_value_heads"]}

    [[rule]]
    name = "*.experts.{expert}.*"   # {expert}: a number
    owners = "expert % ep"      # only ranks at this position of axis ep have the tensor; placements are for other axes

    [[rule]]
    name = "*.experts.gate_up_proj"
    owners = "expert * ep // num_experts"
    dim = 0                     # all experts in one tensor: `expert` is the index along this dim

    [[rule]]
    name = "*._extra_state"
    skip = true                 # left out of the checkpoint

    [[rule]]
    name = "*.query_key_value.weight"
    placements = {tp = "S0"}
    when = "1 - multi_query"    # the rule counts only where this is not 0

    [model]
    axes = ["tp", "ep"]         # a mesh may lack some of these axes: what rules say of them is ignored then
    experts = "num_experts"     # an axis of owners may not have more ranks than that
    head = "*lm_head.weight"    # must be there if config.json says tie_word_embeddings = false

    [numbers]                   # of config.json, under other names or computed; the first whose names are known
    num_key_value_heads = ["num_key_value_heads", "num_attention_heads"]

    [shapes]                    # by config.json: sizes of all dims. "*": any; unknown numbers are not checked
    "*embed_tokens.weight" = [">= vocab_size", "hidden_size"]

    [counts]                    # these numbers must be 0 to num_experts - 1
    "*.experts.{expert}.*" = "num_experts"

    [files]                     # the files of ranks; by default they are found by the number in their names
    pattern = "mp_rank_{tp:02d}_model_states.pt"            # axis names, or {rank}, as Python formats numbers
    prefix = "module."          # only tensors with this prefix; it is removed from their names

Numbers can be expressions: whole numbers, + - * // %, parentheses, and names. Names are the numbers in the tensor's
name, the sizes of mesh axes, [numbers], and the whole numbers of config.json (and of its text_config; true is 1, as is
a table, and false is 0).

The built-in rules, for Hugging Face names and an axis tp (and ep for experts), are in `ready/`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from shardwise.checkpoint.axis_rules import Known
from shardwise.checkpoint.file_patterns import axis_positions, file_name
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.local_files import files_at
from shardwise.checkpoint.model_config import CONFIG, Config, read_config
from shardwise.checkpoint.model_facts import ModelFacts
from shardwise.checkpoint.ready_rules import file_for
from shardwise.checkpoint.rules_file import TomlTable, read_file
from shardwise.checkpoint.sharding_rule import ShardingRule, at
from shardwise.errors import CheckpointError, LayoutError
from shardwise.layout import Layout, Mesh, Placement
from shardwise.quoting import brief
from shardwise.storage.paths import PathLike

AUTO = "auto"  # rules that are found by the config.json
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Rules:
    """An ordered list of rules, their mesh, the names of its rank files, and the model's config.json."""

    rules: tuple[ShardingRule, ...]
    mesh: Mesh | None
    pattern: str | None
    prefix: str
    where: str
    facts: ModelFacts = field(default_factory=ModelFacts)  # what the rules expect of the config
    config: Config | None = None  # the config.json of the model

    def __post_init__(self) -> None:
        if self.mesh is not None and not self.is_auto:
            self._check_axes(self.mesh)
            for rule in self.rules:
                rule.on(self.mesh)
            with at(f"{self.where}, [files]"):
                file_name(self.pattern or "", axis_positions(self.mesh, 0))

    @staticmethod
    def of(config: PathLike | Config, mesh: Mesh | Mapping[str, int] | None = None) -> Rules:
        """The built-in rules for a model, by its config.json: a path to it or to its folder, or its contents.

        Heads, kv heads, experts, fused weights and sizes are those of the config. A mesh that would cut heads is
        refused here, and weights that contradict the config by `layout` and `check`.

        >>> config = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
        >>> rules = Rules.of(config, {"tp": 16})
        >>> print(rules.layout("model.layers.0.self_attn.k_proj.weight", (1024, 4096)))  # each head on two ranks
        1024x4096/heads0=8@tp=16
        """
        if isinstance(config, Mapping):
            found, where = config, CONFIG
        elif not isinstance(config, str | os.PathLike):
            raise LayoutError(f"config must be the path of a folder or config.json, or a mapping, not {brief(config)}")
        else:
            files, file = files_at(config)
            name = file if file is not None and file.endswith(".json") else CONFIG
            found, where = read_config(files, name), str(files.label(name))
        rules = _automatic().with_config(found, where)
        return rules if mesh is None else rules._on(mesh)

    @property
    def is_auto(self) -> bool:
        """True for rules that are to be found by a config.json, which is not known yet."""
        return not self.rules

    def with_mesh(self, /, **sizes: int) -> Rules:
        """The same rules on a mesh of these axes.

        >>> read_rules("llama").with_mesh(dp=2, tp=4).mesh
        Mesh(dp=2, tp=4)
        """
        return self._on(sizes)

    def _on(self, mesh: Mesh | Mapping[str, int]) -> Rules:
        if not isinstance(mesh, Mesh | Mapping):
            raise LayoutError(f"the mesh must be a Mesh or a mapping such as {{'tp': 4}}, not {brief(mesh)}")
        made = replace(self, mesh=mesh if isinstance(mesh, Mesh) else Mesh.of(list(mesh.values()), list(mesh)))
        made._check_mesh()
        return made

    def with_config(self, config: Config, where: str = CONFIG) -> Rules:
        """The same rules for a model with that config.json: what contradicts it is refused.

        >>> rules = read_rules("llama").with_mesh(tp=4).with_config({"num_key_value_heads": 4})
        >>> print(rules.layout("model.layers.0.self_attn.k_proj.weight", (512, 4096)))
        512x4096/S0@tp=4
        """
        if not isinstance(config, Mapping):
            raise LayoutError(f"{where} must be a mapping, not {brief(config)}")
        rules = replace(Rules(*read_file(file_for(config, where))), mesh=self.mesh) if self.is_auto else self
        made = replace(rules, config=config)
        made._check_mesh()
        return made

    def _check_mesh(self) -> None:
        """Refuse a mesh that cuts heads, as far as the config is known."""
        if self.mesh is not None and self.config is not None:
            for rule in self.rules:
                if rule.counted_names <= self._known.numbers.keys() and rule.applies(self._known):
                    rule.check(self.mesh, self._known, self.facts.experts)

    def _check_axes(self, mesh: Mesh) -> None:
        """Refuse a mesh of which the rules know no axis: all tensors would be replicated."""
        axes = sorted({axis for rule in self.rules for axis in rule.optional})
        if axes and not set(axes) & set(mesh.names):
            raise LayoutError(
                f"{self.where}: {mesh} has no axis {' or '.join(axes)}, over which these rules split tensors"
            )

    @property
    def needs_config(self) -> bool:
        """True if the rules name numbers of a config.json."""
        facts = self.facts
        return self.is_auto or any(rule.needs_config for rule in self.rules) or bool(facts.shapes or facts.counts)

    @cached_property
    def _known(self) -> Known:
        """The numbers that expressions may name, before there is the name of a tensor."""
        with at(self.where):
            known = self.facts.known(self.config)
        axes = {axis: 1 for rule in self.rules for axis in rule.optional}
        sizes = {} if self.mesh is None else dict(zip(self.mesh.names, self.mesh.shape, strict=True))
        return known.with_numbers({**axes, **sizes})

    def rule(self, name: str) -> ShardingRule:
        """The first rule that matches a name."""
        return self._match(name)[0]

    def _match(self, name: str) -> tuple[ShardingRule, Known]:
        if self.is_auto:
            raise LayoutError(f"{self.where} needs a config.json: Rules.of(config, mesh), or one beside the weights")
        for rule in self.rules:
            found = rule.match(name)
            if found is not None and rule.applies(self._known):
                return rule, self._known.with_numbers(found)
        raise LayoutError(
            f"{self.where}: none of {len(self.rules)} rules matches {name!r}: add one that does (a TOML file with "
            f'base = "llama" adds to those built-in rules)'
        )

    def skips(self, name: str) -> bool:
        """True for a name that the rules leave out."""
        return next((rule.skip for rule in self._matching(name)), False)

    def matches(self, name: str) -> bool:
        """True for a name that a rule matches."""
        return next(self._matching(name), None) is not None

    def _matching(self, name: str) -> Iterator[ShardingRule]:
        return (rule for rule in self.rules if rule.match(name) is not None and rule.applies(self._known))

    def known_mesh(self) -> Mesh:
        """The mesh; refused if there is none."""
        if self.mesh is None:
            raise LayoutError(
                f"{self.where}: there is no mesh: give the sizes of its axes, with_mesh(tp=4) or --mesh tp=4"
            )
        return self.mesh

    def placed(self, name: str) -> tuple[ShardingRule, Known]:
        """The rule of a tensor that is not left out, and the numbers that its expressions may name."""
        rule, known = self._match(name)
        if rule.skip:
            raise LayoutError(f"{rule.where}: {name!r} is left out (skip = true)")
        return rule, known

    def placements(self, name: str) -> tuple[Placement, ...]:
        """The placements of a tensor, one per axis of the mesh.

        >>> read_rules("llama").with_mesh(dp=2, tp=4).placements("model.layers.0.self_attn.o_proj.weight")
        (Replicate(), Shard(dim=1))
        """
        rule, known = self.placed(name)
        with at(f"{rule.where}: {name!r}"):
            placements = rule.placements(self.known_mesh(), known)
            if placements is None:
                raise LayoutError("its layout depends on its shape or number: use layout(name, shape)")
            return placements

    def layout(self, name: str, shape: Sequence[int]) -> Layout:
        """The layout of a tensor; the owners are the ranks of the mesh.

        >>> print(read_rules("llama").with_mesh(tp=4).layout("model.embed_tokens.weight", (32000, 4096)))
        32000x4096/S0@tp=4
        """
        key = name, tuple(shape)
        if key not in self._layouts:
            rule, known = self.placed(name)
            with at(f"{rule.where}: {name!r}"):
                self.facts.check_shape(name, shape, known)
                self._layouts[key] = rule.layout(shape, self.known_mesh(), known)
        return self._layouts[key]

    @cached_property
    def _layouts(self) -> dict[tuple[str, tuple[int, ...]], Layout]:
        """Layouts so far: a conversion asks for each several times."""
        return {}

    def check(self, shapes: Shapes, *, whole: bool = True) -> None:
        """Refuse tensors that the rules or the config.json contradict. `whole`: they are all tensors of the model.

        >>> config = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 96}
        >>> Rules.of(config, {"tp": 2}).check({"model.embed_tokens.weight": (96, 48)})
        Traceback (most recent call last):
        shardwise.errors.LayoutError: ... (96, 48), but config.json says (at least vocab_size = 96, hidden_size = 32)...
        """
        for name, shape in shapes.items():
            self.layout(name, shape)
        if whole and self.config is not None:
            with at(self.where):
                self.facts.check_names(shapes, self.config, self._known)


RulesSource = Rules | str | os.PathLike[str] | TomlTable  # what `read_rules` takes


def read_rules(source: RulesSource) -> Rules:
    """Rules from a file, the name of built-in ones ("llama"), a TOML string, or a mapping as TOML would give it.

    "auto": the built-in ones for the config.json beside the weights. The path of a config.json: those for that model.

    >>> rules = read_rules('''
    ... [mesh]
    ... tp = 2
    ... [[rule]]
    ... name = "*.qkv.weight"
    ... fused = {dim = 0, segments = [8, 2, 2]}
    ... ''')
    >>> print(rules.layout("h.0.qkv.weight", (12, 4)))
    12x4/fused0=8,2,2@tp=2
    """
    if isinstance(source, Rules):
        return source
    if source == AUTO:
        return _automatic()
    if isinstance(source, str | os.PathLike) and Path(source).suffix == ".json":
        return Rules.of(source)
    if not isinstance(source, str | os.PathLike | Mapping):
        raise LayoutError(
            f"rules must be a path, the name of built-in ones, a TOML string or a mapping, not {brief(source)}"
        )
    return Rules(*read_file(source))


def rules_for(source: RulesSource, files: Files) -> Rules:
    """Rules with the config.json beside the weights, where they need one and there is one."""
    rules = read_rules(source)
    if not rules.needs_config or rules.config is not None:
        return rules
    if not files.has(CONFIG):
        if rules.is_auto:
            raise CheckpointError(
                f"{files.label(CONFIG)} is missing, by which rules='auto' finds the rules: name them, as in "
                f"rules='llama', or give the config.json of the model, as in rules='path/config.json'"
            )
        return rules
    return rules.with_config(read_config(files), str(files.label(CONFIG)))


def _automatic() -> Rules:
    """Rules that a config.json chooses."""
    return Rules((), None, None, "", "rules 'auto'")
