"""The adapter for vLLM without vLLM: a version that it does not know is refused before anything is touched."""

import pytest
import torch

from shardwise.engines import record, vllm
from shardwise.errors import EngineError


def installed(monkeypatch, found):
    def version(package):
        if package == "vllm" and found is not None:
            return found
        raise vllm.PackageNotFoundError(package)

    monkeypatch.setattr(vllm, "version", version)


@pytest.mark.parametrize(("found", "named"), [("0.99.1", "0.99.1"), ("0.31.0+cpu", "0.31.0"), (None, "none")])
def test_another_version_is_refused_and_both_are_named(monkeypatch, found, named):
    installed(monkeypatch, found)
    with pytest.raises(EngineError, match=f"knows vLLM 0.32.0, and {named} is installed: install a known version"):
        vllm.record(torch.nn.Linear(2, 2), {})


def test_a_released_recording_holds_no_memory_until_it_is_resolved():
    model = torch.nn.Linear(3, 2, bias=False)
    recorded = record(
        lambda weights: [model.weight.data.copy_(tensor) for _, tensor in weights],
        {"w": ((2, 3), torch.float32)},
        module=model,
    )
    recorded.release()
    assert recorded["w"].local_tensor().is_meta
    recorded.resolve()
    assert recorded["w"].local_tensor().data_ptr() == model.weight.data_ptr()
