"""Every parameter of every model equals vLLM's own load bit-for-bit, from files and from FSDP2 trainers."""

import pytest
import table
import vllm_models as vllm
from judging import World
from tiny import MODELS

from shardwise.testing import on_ranks

WORLDS = {1: World(3, 1), 2: World(2, 2), 4: World(4, 4)}  # gpt-oss in vLLM wants sizes that the whole world divides


@pytest.fixture(scope="module", params=WORLDS)
def judged(request, folders):
    """By model: what each rank of the engine found, or the error."""
    world = WORLDS[request.param]
    experts = vllm.config_of(folders["Mixtral"], world.ranks)  # vLLM makes the groups for experts too

    def work(rank):
        world.join(experts)
        return {name: world.judge(folders[name]) for name in MODELS}

    by_rank = on_ranks(world.size, work, timeout=300)
    return {name: [found[name] for found in by_rank[world.trainers :]] for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_vllms_own_load(name, judged):
    for found in judged[name]:
        assert not isinstance(found, str), found
        assert (found.loaded, found.synced) == ([], [])


@pytest.mark.parametrize("name", MODELS)
def test_trainers_send_the_fewest_bytes(name, judged):
    found = judged[name][0]
    assert found.moved == found.bound <= found.explanation.bytes  # less, where the engine keeps a larger dtype
    if not found.explanation.through_loader:
        assert found.moved <= found.needed  # no cell of a parameter is received twice


OTHERWISE = {  # where the built-in rules and vLLM differ on purpose
    "Llama, vocabulary 1003": ("lm_head.weight", "embed_tokens.weight"),  # vLLM pads it to a multiple of 64 first
    "gpt-oss": ("down_proj_bias",),  # vLLM gives what is added to a sum to one rank
    "Falcon": ("query_key_value.weight",),  # with more ranks than groups of heads, whole groups are replicated
}


@pytest.mark.parametrize("name", MODELS)
def test_built_in_rules_split_as_vllm_does(name, judged):
    for found in judged[name]:
        assert [one for one in found.split_otherwise if not one.endswith(OTHERWISE.get(name, "none"))] == []


@pytest.mark.parametrize("judged", [4], indirect=True)
def test_the_table_in_the_documentation_is_what_was_judged(judged, request):
    found = table.rows({name: ranks[0].explanation for name, ranks in judged.items()})
    if request.config.getoption("write_table"):
        table.write(found)
    assert table.written() == found, "docs/engines.md has another table: make judges-table writes it"
