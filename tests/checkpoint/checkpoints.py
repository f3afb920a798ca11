"""What tests of saving, loading and crashes share: state dicts of many kinds, judges, and what is in files."""

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

sys.path.append(str(Path(__file__).parents[1] / "state"))  # where the small Llama is

from models import full, held, numbers, same, sharded

from shardwise import checkpoint
from shardwise.state.traverse import flatten_state_dict
from shardwise.storage.sums import data_name, with_digest

INDEX = "shardwise.json"


def names_in(path):
    """All that is in a directory, but for checksums."""
    return sorted(entry.name for entry in Path(path).iterdir() if data_name(entry.name) == entry.name)


def shards_in(path):
    """The names of our files of tensors."""
    return [name for name in names_in(path) if name.startswith("shard-")]


def all_of(path):
    """Every tensor and every value, by our own word."""
    found = checkpoint.open(path)
    return {name: entry.read() for name, entry in found.items()}, dict(found.objects)


def same_tensors(found, expected):
    """The same names, and equal to the last bit; in any order."""
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        same(found[name], value)


def has(path, tensors, values=None):
    """A directory has exactly these whole tensors and these values."""
    found, objects = all_of(path)
    same_tensors(found, tensors)
    assert repr(objects) == repr(values or {})  # nan is not equal to itself, and 1 is equal to True


def pasted(path):
    """The whole tensors, put together from what the safetensors package reads: every cell comes once."""
    parts = {}
    for name in shards_in(path):
        for key, part in load_file(Path(path, name)).items():
            tensor, _, corner = key.rpartition("@")
            lo = [int(at) for at in corner.split(",") if at]
            parts.setdefault(tensor, []).append((lo, [a + b for a, b in zip(lo, part.shape, strict=True)], part))
    return {name: _whole(name, several) for name, several in parts.items()}


def _whole(name, parts):
    shape = [max(ends) for ends in zip(*(hi for _, hi, _ in parts), strict=True)]
    whole, times = torch.empty(shape, dtype=parts[0][2].dtype), torch.zeros(shape, dtype=torch.int64)
    for lo, hi, part in parts:
        box = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
        whole[box] = part
        times[box] += 1
    torch.testing.assert_close(times, torch.ones_like(times), msg=f"cells of {name} are not there once")
    return whole


def data_bytes(path):
    """How many bytes of tensors each of our files has, in the order of the files."""
    found = []
    for name in shards_in(path):
        file = Path(path, name).read_bytes()
        found.append(len(file) - 8 - int.from_bytes(file[:8], "little"))
    return found


def rewritten(file, change):
    """Change the JSON of a file, an index or the header of a safetensors file, in place."""
    file = Path(file)
    if file.suffix == ".json":
        said = json.loads(file.read_text())
        change(said)
        text = json.dumps({name: value for name, value in said.items() if name != "digest"}).encode()
        file.write_bytes(with_digest(text) if "sums" in said else text)
        return
    text = file.read_bytes()
    size = int.from_bytes(text[:8], "little")
    said = json.loads(text[8 : 8 + size])
    change(said)
    header = json.dumps(said).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + text[8 + size :])


def nested_values():
    """What is no tensor, of every kind that state dicts have."""
    return {
        "step": 7,
        "big": 2**80,
        "yes": True,
        "none": None,
        "text": 'naïve "quoted" \\ \n \ud83d 雪',
        "raw": b"\x00\xff",
        "floats": [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324],
        "pair": (1, (2.5, None)),
        "empty": {"list": [], "dict": {}, "tuple": (), "text": ""},
        "settings": {3: "three", "betas": (0.9, 0.95), "size": torch.Size([2, 3]), "dtype": torch.bfloat16},
    }


def flat_values():
    """The same with one level of names."""
    return flatten_state_dict(nested_values())[0]


LAYOUTS = {
    1: ("9x6/R@1", "9x6/cyclic0=2@1", "9x6/S1@1"),
    2: ("9x6/S0@2", "9x6/S1@2", "9x6/R@2", "9x6/cyclic0=2@2", "9x6/fused0=5,4@2"),
    3: ("9x6/S0@3", "9x6/S1@3", "9x6/R@3", "9x6/cyclic1=1@3"),
    4: ("9x6/S0@4", "9x6/S1,S0@2x2", "9x6/R,S1@2x2", "9x6/cyclic0=1@4", "9x6/fused1=4,2@4", "9x6/R@4"),
}


def own_shards(ranks, start=0):
    """Our ShardedTensors in many layouts, and the whole tensors."""
    wholes = {layout: numbers(9, 6, start=100 * at + start) for at, layout in enumerate(LAYOUTS[ranks])}
    return {layout: held(whole, layout) for layout, whole in wholes.items()}, wholes


def trained(how, ranks):
    """A model and its optimizer, after a step."""
    model = sharded(how, 3, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    return model, optimizer


def training(how, ranks):
    """All that is saved of a training: a nested state dict."""
    model, optimizer = trained(how, ranks)
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "step": 7}


def split(state_dict):
    """The whole tensors of a nested state dict, and its other values, with one level of names."""
    flat, _ = flatten_state_dict(state_dict)
    tensors = {name: full(value).detach() for name, value in flat.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in flat.items() if name not in tensors}


def emptied(state_dict):
    """The same with zeros in place, and other values lost."""
    flat, _ = flatten_state_dict(state_dict)
    for value in flat.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    return state_dict
