"""One process imports vLLM, saves all tiny models, and is forked for every world of ranks."""

import os
from pathlib import Path

import pytest

# before vLLM is imported: nothing from a network, no messages but errors, one thread per rank
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "VLLM_NO_USAGE_STATS": "1"}

import tiny


def pytest_addoption(parser):
    parser.addoption("--write-table", action="store_true", help="write the table of docs/engines.md")


@pytest.fixture(scope="session", autouse=True)
def no_shared_memory_is_left():
    """vLLM removes its segments when a process ends in order, and forked ranks do not."""
    yield
    for segment in Path("/dev/shm").glob(f"judges-{os.getpid()}-*"):
        segment.unlink()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The folder of every tiny model, by its name."""
    base = tmp_path_factory.mktemp("models")
    return {name: tiny.save(name, base / tiny.folder_name(name)) for name in tiny.MODELS}
