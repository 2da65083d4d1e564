"""A cell in a virtual environment of its own: this checkout as a wheel beside the pinned versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from integration.upstream.suite import ROOT, read_report

from .binaries import ServerMissing, provide
from .pins import CELLS, DEMOS, FIXTURES, PROGRAMS, SERVERS, TESTS, TOOLS, Cell, Store, is_beyond

_INI = """[pytest]
pythonpath = .
timeout = 120
addopts = -m "not long"
markers =
    long
    stores
    only_on
"""


@dataclass
class Run:
    """The tests of a cell on one server. `failed` are names of tests and of steps; the rest is what `integration.tally`
    counts."""

    cell: str
    kind: str
    failed: list[str] = field(default_factory=list)
    passed: int = 0
    faults: int = 0
    jobs: int = 0
    lost: int = 0
    seconds: float = 0.0


def interpreter(version: str) -> Path:
    """Raises FileNotFoundError saying where it was looked for."""
    for candidate in _interpreters(version):
        shown = subprocess.run([candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        # pyenv's own commands on PATH only answer for the versions that are switched on
        if shown.returncode == 0 and shown.stdout.strip() == version:
            return candidate
    raise FileNotFoundError(f"no Python {version}: no python{version} on PATH that runs, none of pyenv")


def _interpreters(version: str) -> Iterator[Path]:
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        found = shutil.which(f"python{version}", path=folder)
        if found:
            yield Path(found)
    pyenv = shutil.which("pyenv")
    if pyenv:
        root = subprocess.run([pyenv, "root"], text=True, stdout=subprocess.PIPE, check=True).stdout.strip()
        yield from sorted(Path(root, "versions").glob(f"{version}.*/bin/python"), reverse=True)


def build_wheel(folder: Path) -> Path:
    """This checkout."""
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT],
                   check=True, stdin=subprocess.DEVNULL)
    (wheel,) = folder.glob("streambroker-*.whl")
    return wheel


def run_cell(name: str, wheel: Path, folder: Path) -> Iterator[Run]:
    """On each of its servers, in `folder`, which is left with the logs of all steps; what fails before the tests is a
    failure on each."""
    cell = CELLS[name]
    try:
        failed = _prepare(cell, wheel, folder)
    except (OSError, subprocess.SubprocessError) as error:
        failed = [f"{type(error).__name__}: {error}"]
    for kind in cell.servers:
        run = Run(name, kind, list(failed))
        if (folder / "pytest.ini").exists():
            began = time.monotonic()
            try:
                _test(cell, folder, run)
            except (OSError, ServerMissing, subprocess.SubprocessError) as error:
                run.failed.append(f"{type(error).__name__}: {error}")
            run.seconds = time.monotonic() - began
        yield run


def _prepare(cell: Cell, wheel: Path, folder: Path) -> list[str]:
    """The environment, what a user's program does in it, the folder of tests; the names of what failed."""
    subprocess.run([interpreter(cell.python), "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    install: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _step("install", [*install, wheel, *cell.pins], folder, timeout=600).check_returncode()
    failed = []
    if not cell.hiredis and _step("hiredis", [python, "-c", "import hiredis"], folder).returncode == 0:
        failed.append("hiredis is there")
    if _step("program", [python, "-c", PROGRAMS[cell.framework]], folder).returncode:
        failed.append("program")
    fixtures = () if cell.celery else FIXTURES
    _step("tools", [*install, *cell.pins, *fixtures, *TOOLS], folder, timeout=600).check_returncode()
    for number, arguments in enumerate(DEMOS[cell.framework]):
        if _step(f"demo{number}", [python, "-m", "streambroker", "demo", "--json", *arguments], folder).returncode:
            failed.append(" ".join(["demo", *arguments]))
    for part in ("integration", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pytest.ini").write_text(_INI)
    return failed


def _test(cell: Cell, folder: Path, run: Run) -> None:
    store: Store = "nats" if run.kind.startswith("nats") else "redis"
    # of nats-servers, tests also ask for `nats`, the current one: here that is the pinned one
    kind = "nats" if store == "nats" else run.kind
    binary = {f"STREAMBROKER_SERVER_{kind.upper()}": str(provide(run.kind))}
    report = folder / f"{run.kind}.xml"
    _step(run.kind, [folder / "venv" / "bin" / "python", "-m", "pytest", "-c", "pytest.ini", "-p", "no:cacheprovider",
                     "-W", "ignore", "-q", "-rs", "--server", kind, f"--junitxml={report}",
                     *TESTS[cell.framework, store]], folder, timeout=1500, more=binary)
    result = read_report(run.kind, report, 0)
    run.passed = result.passed
    run.failed += [test for test in result.failed if not is_beyond(test, cell)]
    if not result.finished or not result.passed:
        run.failed.append("tests did not run")
    pin = SERVERS[run.kind]
    log = (folder / f"{run.kind}.log").read_text()
    for faults, jobs, lost in re.findall(r"^\|.*\| \d+ \| (\d+) \| (\d+) \| (\d+) \|$", log, re.MULTILINE):
        run.faults += int(faults)
        run.jobs += int(jobs)
        run.lost += int(lost)
    used = re.findall(r"^servers used: (.*)$", log, re.MULTILINE)
    if f"{pin.store.partition('-')[0].lower()} {pin.version}" not in ", ".join(used).split(", "):
        run.failed.append(f"no test ran on {pin.store} {pin.version}")


def _step(name: str, command: Sequence[str | Path], folder: Path, timeout: float = 120,
          more: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items()
                   if key != "PYTHONPATH" and not key.startswith("STREAMBROKER_")}
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.run(command, cwd=folder, env={**environment, **(more or {})}, stdin=subprocess.DEVNULL,
                              stdout=log, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False)
