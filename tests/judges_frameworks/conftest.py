"""Frameworks judge checkpoints. They are imported once, and forked for every world of ranks."""

import os

# before a framework is imported: no GPU, nothing from a network, no messages but errors, one thread per rank
os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
os.environ |= {"DEEPSPEED_LOG_LEVEL": "error"}

import judged
import pytest

PASSED, FAILED = pytest.StashKey[list](), pytest.StashKey[set]()


def pytest_addoption(parser):
    parser.addoption("--write-table", action="store_true", help="write the table of docs/compatibility.md")


def pytest_configure(config):
    config.addinivalue_line("markers", "judged(package, what, read or written, compared with): a row of that table")
    config.stash[PASSED], config.stash[FAILED] = [], set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    mark = item.get_closest_marker("judged")
    if mark is not None and report.failed:
        item.config.stash[FAILED].add(mark.args)
    elif mark is not None and call.when == "call" and report.passed:
        item.config.stash[PASSED].append(mark.args)
    return report


def pytest_sessionfinish(session, exitstatus):
    """Of a whole run: write the table, or compare it."""
    config = session.config
    if exitstatus or config.option.keyword or config.option.markexpr or len(config.args) != 1 or "::" in config.args[0]:
        return
    found = judged.table(set(config.stash[PASSED]) - config.stash[FAILED])
    if config.option.write_table:
        judged.write(found)
    elif found != judged.written():
        print(f"\nthe table of {judged.PAGE.name} is not that of this run: make judges-table\n{found}")
        session.exitstatus = 1
