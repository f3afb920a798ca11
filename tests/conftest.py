"""How hypothesis runs: no deadlines, and in CI the same examples every time. Look-ups of names do not take long.

Tests with the mark `devices` run on the CPU and on a device: `pytest --device cuda` for GPUs of this machine. A
test with the mark fails if it does not use the test device.
"""

import os
import subprocess
import sys

import pytest
from hypothesis import settings

# A store of torch looks up the names of hosts. Where no server answers, each try would take 5 seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")


def pytest_addoption(parser):
    parser.addoption("--device", default="far", choices=("far", "cuda"), help="what tests of devices run on")


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "devices(group=True): runs on the CPU, and on a device (see --device), where tensors must cross a process "
        "group; with group=False it is enough that something runs on the device",
    )


def pytest_generate_tests(metafunc):
    if metafunc.definition.get_closest_marker("devices"):
        metafunc.parametrize("ranks_on_a_device", ["cpu", metafunc.config.getoption("device")], indirect=True)


NO_QUEUE = "device_ready_queues_"  # in the error of an autograd engine that was started before the device was known
AFRESH = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """The test device is made known on forked ranks. They inherit the autograd engine of this process, and if an
    earlier test has started it here, it cannot run on the device: then the test runs in a process of its own."""
    try:
        return (yield)
    except Exception as error:
        if NO_QUEUE not in str(error):
            raise
        again = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", pyfuncitem.nodeid]
        run = subprocess.run(again, cwd=pyfuncitem.config.rootpath, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout
        pyfuncitem.stash[AFRESH] = True
        return True


@pytest.fixture(autouse=True)
def ranks_on_a_device(request, monkeypatch):
    """Tests with the mark `devices`: `on_ranks` of the module, and the fixture `ranks`, make ranks on the device."""
    device = getattr(request, "param", "cpu")
    if device == "cpu":
        yield
        return
    import ranks
    from devices import Usage

    usage = Usage()
    for module in (ranks, request.module):
        if hasattr(module, "on_ranks"):
            monkeypatch.setattr(module, "on_ranks", usage.on_device(device))
    yield
    if device == "far" and not request.node.stash.get(AFRESH, False):
        usage.check(**{"group": True, **request.node.get_closest_marker("devices").kwargs})
