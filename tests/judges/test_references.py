"""vLLM's own load is a reference: the same twice, and every parameter is filled."""

import pytest
import vllm_models as vllm
from tiny import MODELS

from shardwise.testing import on_ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_vllm_loads_the_same_bits_twice_whatever_was_there(ranks, folders):
    moe = vllm.config_of(folders["Mixtral"], ranks)  # a model with experts: vLLM makes the groups for them too

    def work(rank):
        vllm.join(moe, ranks)
        return {name: unequal(folders[name], ranks) for name in MODELS}

    assert on_ranks(ranks, work, timeout=300) == [dict.fromkeys(MODELS, [])] * ranks


def unequal(folder, ranks):
    loaded = []
    for _ in range(2):
        config, model = vllm.build(folder, ranks)
        vllm.poison(model)
        vllm.load(config, model, vllm.weights_of(config, model))
        loaded.append(model)
    return vllm.differences(*loaded)
