"""The built-in rules: one TOML file for each family of models, found by a name or by a config.json."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files as resources
from typing import Any

from shardwise.checkpoint.model_config import Config, text_config
from shardwise.errors import LayoutError
from shardwise.quoting import brief

FILES = (
    "llama",
    "mixtral",
    "qwen_moe",
    "phi3",
    "gpt2",
    "gpt_neox",
    "bloom",
    "falcon",
    "deepseek_v3",
    "gpt_oss",
    "mamba",
    "megatron",
)
ENDING = re.compile(r"(For[A-Z]\w*|LMHeadModel|DoubleHeadsModel|TextModel|Model)$")  # of the class of a model
HOW_TO_WRITE = (
    "write rules: a TOML file with a [[rule]] for every kind of tensor, or with base = {near!r} and rules for the "
    "tensors that differ (docs/rules.md)"
)


@cache
def ready_table(file: str) -> Mapping[str, Any]:
    """The contents of a built-in file."""
    return tomllib.loads((resources("shardwise.checkpoint") / "ready" / f"{file}.toml").read_text("utf-8"))


@cache
def ready_names() -> Mapping[str, str]:
    """The file for every name: types of models as config.json has them, and shorter names."""
    models = {file: ready_table(file)["model"] for file in FILES}
    return {name: file for file in FILES for name in (*models[file]["types"], *models[file].get("aliases", ()))}


def ready_file(name: str) -> str | None:
    """The file of built-in rules by their name, however it is spelt.

    >>> ready_file("gemma"), ready_file("GPT-NeoX"), ready_file("nope")
    ('llama', 'gpt_neox', None)
    """
    return {_plain(known): file for known, file in ready_names().items()}.get(_plain(name))


def file_for(config: Config, where: str) -> str:
    """The built-in rules for a model, by model_type and architectures of its config.json.

    >>> file_for({"model_type": "qwen3"}, "config"), file_for({"architectures": ["GPT2LMHeadModel"]}, "config")
    ('llama', 'gpt2')
    """
    types = {_plain(name): file for file in FILES for name in ready_table(file)["model"]["types"]}
    kind, classes = config.get("model_type"), config.get("architectures")
    names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list | tuple) else []
    by_type = types.get(_plain(kind)) if isinstance(kind, str) else None
    by_class = next((types[one] for name in names if (one := _plain(ENDING.sub("", name))) in types), None)
    if by_type is not None and by_class is not None and by_type != by_class:
        raise LayoutError(
            f"{where}: model_type {brief(kind)} and architectures {brief(names)} are different kinds of models "
            f"(built-in rules {by_type!r} and {by_class!r}): correct it, or name the rules"
        )
    found = by_type or by_class
    if found is None:
        raise _unknown(kind, names, config, where)
    return found


def _unknown(kind: object, names: Sequence[str], config: Config, where: str) -> LayoutError:
    if not isinstance(kind, str) and not names:
        return LayoutError(f"{where} has neither model_type nor architectures: name the rules, such as {'llama'!r}")
    inside = text_config(config).get("model_type")
    asked = inside if isinstance(inside, str) and ready_file(inside) else kind if isinstance(kind, str) else names[0]
    near = get_close_matches(str(asked)[:100], list(ready_names()), 1, 0)[0]
    known = ", ".join(sorted(ready_names()))
    return LayoutError(
        f"{where}: no built-in rules for model_type {brief(kind)}, architectures {brief(list(names))}. The nearest "
        f"are {near!r}: if they fit, name them; otherwise {HOW_TO_WRITE.format(near=near)}. Built-in are {known}"
    )


def _plain(name: str) -> str:
    return re.sub(r"[-_. ]", "", name).lower()
