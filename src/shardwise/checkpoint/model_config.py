"""The config.json of a model, beside its weights: how it is read, and the numbers in it."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.checkpoint.expressions import LARGEST
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.formats.safetensors import parse_json

CONFIG = "config.json"
Config = Mapping[str, object]


def read_config(files: Files, name: str = CONFIG) -> Config:
    """Its contents."""
    return parse_json(files.read(name), files.label(name))


def config_numbers(config: Config) -> dict[str, int]:
    """The whole numbers of a config.json, with those of its text_config. true is 1, as is a table; false is 0."""
    both = {**config, **text_config(config)}
    numbers = {str(key): int(value) for key, value in both.items() if isinstance(value, int) and abs(value) < LARGEST}
    return {**numbers, **{str(key): 1 for key, value in both.items() if isinstance(value, Mapping)}}


def text_config(config: Config) -> Config:
    """The part of a config that tells of the language model, if it has one."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else {}
