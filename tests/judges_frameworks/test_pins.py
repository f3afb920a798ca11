"""This environment has the versions that its pins name."""

from importlib.metadata import version
from pathlib import Path

PINS = Path(__file__).parents[2] / "constraints-judges-frameworks.txt"


def test_every_package_has_the_version_of_its_pin():
    pins = dict(line.split("==") for line in PINS.read_text().splitlines() if "==" in line)
    assert {name: version(name).partition("+")[0] for name in pins} == pins
