"""A running engine that was synced answers as a fresh one does that was started with the same weights."""

import pytest
import running
import tiny

SERVED = ["Llama", "Qwen3-MoE", "gpt-oss", "Gemma 2"]


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Three checkpoints with different weights, by model."""
    base = tmp_path_factory.mktemp("versions")
    return {
        name: [tiny.save(name, base / f"{tiny.folder_name(name)}-{n}", seed=n) for n in range(3)] for name in SERVED
    }


def fresh(folder, ranks):
    return running.in_process(lambda: running.answers(running.engine(folder, ranks)))


def synced(folders, ranks):
    """The answers of an engine after every sync. Cached keys and values are of the weights before."""
    llm = running.engine(folders[0], ranks)
    found = [running.answers(llm)]
    for folder in folders[1:]:
        llm.collective_rpc("sync_from", args=(str(folder),))
        llm.reset_prefix_cache()
        found.append(running.answers(llm))
    return found


@pytest.mark.parametrize("name", SERVED)
def test_a_synced_engine_answers_as_a_fresh_one(name, versions):
    found = running.in_process(lambda: synced(versions[name], ranks=1))
    assert found[1:] == [fresh(folder, ranks=1) for folder in versions[name][1:]]
    assert found[0] != found[1] != found[2]


def test_workers_in_processes_of_their_own_are_synced_too(versions):
    *_, last = found = running.in_process(lambda: synced(versions["Llama"], ranks=2))
    assert last == fresh(versions["Llama"][-1], ranks=2)
    assert found[0] != found[1] != found[2]


def test_a_sync_that_fails_leaves_the_weights_from_before(versions):
    folder, other, _ = versions["Llama"]

    def work():
        llm = running.engine(folder)
        before = running.answers(llm)
        (note,) = llm.collective_rpc("fail_to_sync", args=(str(other),))
        (refusal,) = llm.collective_rpc("reload_other", args=(str(other),))
        return before == running.answers(llm), note, refusal

    same, note, refusal = running.in_process(work)
    assert same
    assert note == "the reload was not finished: the engine has the weights from before it"
    assert "but had shape [1, 2, 3]" in refusal
