"""The files beside weights that `from_pretrained` reads: config, tokenizer, generation. Copied by conversions."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from shardwise.checkpoint.files import Files
from shardwise.checkpoint.model_config import CONFIG, read_config
from shardwise.checkpoint.quantized import ComputedEntry, ValueEntry
from shardwise.checkpoint.streams import Stream
from shardwise.errors import CheckpointError
from shardwise.job.casts import PLAIN
from shardwise.storage.folders import OutputFolder

MOST = 2**27  # bytes of such a file
BESIDE = re.compile(
    r"(config|generation_config|(\w+_)?tokenizer(_\w+)?|special_tokens_map|added_tokens|vocab|(video_|image_)?"
    r"(pre)?processor_config|feature_extractor_config|chat_template)\.json"
    r"|merges\.txt|vocab\.txt|chat_template\.jinja|tokenizer\.model|[\w.-]+\.(tiktoken|spm)|spiece\.model"
    r"|sentencepiece\.bpe\.model"
)


def config_files(files: Files) -> list[str]:
    """The names of those that are there."""
    return [name for name in files.names() if BESIDE.fullmatch(name)]


def copies_of(files: Files, streams: Mapping[str, Stream], folder: OutputFolder) -> dict[str, bytes]:
    """What is to be written beside the weights; refused if another file has the name already."""
    names = config_files(files)
    if not names:
        raise CheckpointError(
            f"{files.root} has no config.json and no tokenizer: leave out with_config=, or give the folder that has "
            f"them"
        )
    if large := [name for name in names if files.size(name) > MOST]:
        raise CheckpointError(f"{files.label(large[0])} has more than {MOST} bytes: it is not a file of a tokenizer")
    copies = {name: files.read(name) for name in names}
    if CONFIG in copies:
        copies[CONFIG] = _changed(files, copies[CONFIG], streams)
    there = set(folder.names())
    for name, data in copies.items():
        if name in there and folder.read(name, len(data) + 1) != data:
            raise CheckpointError(
                f"{folder.path_of(name)} is there with other contents: give another path, or remove it"
            )
    return {name: data for name, data in copies.items() if name not in there}


def _changed(files: Files, text: bytes, streams: Mapping[str, Stream]) -> bytes:
    """A config.json that tells the dtype that the weights have now, and of no codes that became values."""
    config = dict(read_config(files))
    sources = [entry for stream in streams.values() for _, entry in stream.sources]
    if any(type(entry) is ComputedEntry for entry in sources):
        raise CheckpointError(
            f"{files.label(CONFIG)} does not say how weights are quantized now. Remedy: leave out with_config=, and "
            f"write a quantization_config into a copy of it"
        )
    if any(isinstance(entry, ValueEntry) for entry in sources):
        config.pop("quantization_config", None)
    changed = _with_dtype(config, _main_dtype(streams.values()))
    return text if changed == read_config(files) else json.dumps(changed, indent=2).encode() + b"\n"


def _main_dtype(streams: Iterable[Stream]) -> torch.dtype | None:
    """The dtype that most bytes of plain floats have."""
    sizes = Counter[torch.dtype]()
    for stream in streams:
        if stream.dtype in PLAIN:
            sizes[stream.dtype] += stream.size
    return sizes.most_common(1)[0][0] if sizes else None


def _with_dtype(config: Mapping[str, object], dtype: torch.dtype | None) -> dict[str, object]:
    """With the name of a dtype wherever a config names one."""
    name, made = str(dtype).removeprefix("torch."), dict[str, object]()
    for key, value in config.items():
        if key in ("dtype", "torch_dtype") and isinstance(value, str) and dtype is not None:
            made[key] = name
        else:
            made[key] = _with_dtype(value, dtype) if key.endswith("_config") and isinstance(value, dict) else value
    return made


def write_copies(copies: Mapping[str, bytes], folder: OutputFolder) -> None:
    """Write them, without checksums: they are small, and other programs change them."""
    for name, data in copies.items():
        with folder.write(name, sums=False) as file:
            file.write(data)
