"""vLLM's own load is a reference: the same twice, and every parameter is filled."""

import pytest
import vllm_models as vllm
from tiny import MODELS

from shardwise.testing import on_ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_vllm_fills_all_parameters_with_the_same_bits_whatever_was_there(ranks, folders):
    experts = vllm.config_of(folders["Mixtral"], ranks)  # vLLM makes the groups for experts too

    def work(rank):
        vllm.join(experts, ranks)
        return {name: unequal(folders[name], ranks) for name in MODELS}

    assert on_ranks(ranks, work, timeout=300) == [dict.fromkeys(MODELS, ([], []))] * ranks


def unequal(folder, ranks):
    model, again = (vllm.loaded(folder, ranks) for _ in range(2))
    return vllm.poisoned(model), vllm.differences(model, again)
