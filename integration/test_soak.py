"""The soak as its command runs it, on each pair of store and framework."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from integration.worker import ROOT

MINUTES = 3


@pytest.mark.long
@pytest.mark.timeout(MINUTES * 60 + 600)
@pytest.mark.parametrize("framework", ["celery", "dramatiq"])
@pytest.mark.parametrize("engine", ["redis", "jetstream"])
def test_minutes_of_disturbance(engine, framework):
    done = subprocess.run(
        [sys.executable, "-m", "integration.soak", "--engine", engine, "--framework", framework, "--minutes",
         str(MINUTES), "--json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    verdict = json.loads(done.stdout)
    assert verdict["ok"]
    assert verdict["done"] > 60 * MINUTES
    # it has been a soak
    assert {"kill", "deploy", "cut", "crash"} <= verdict["disturbances"].keys()
    assert {"kill", "poison"} <= verdict["causes"].keys()
