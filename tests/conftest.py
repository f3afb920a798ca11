"""How hypothesis runs: no deadlines, and in CI the same examples every time. Look-ups of names do not take long."""

import os

from hypothesis import settings

# A store of torch looks up the names of hosts. Where no server answers, each try would take 5 seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")
