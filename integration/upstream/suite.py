"""Tests of Celery and Kombu from their source distributions, run unchanged against a broker URL."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tarfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from streambroker.testing.servers import RedisServer

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Result:
    """Of one pytest process. `failed` names tests, errors among them."""

    name: str
    passed: int
    failed: tuple[str, ...]
    skipped: int
    seconds: float
    finished: bool

    def unexpected(self, known: Mapping[str, str]) -> list[str]:
        """Failures that `known` (test name to cause) does not explain; a run without a verdict is one."""
        return [name for name in self.failed if name not in known] + ([] if self.finished else [f"{self.name}: no end"])


def unpack_tests(package: str, folder: Path) -> Path:
    """The folder `t` of the source distribution of the installed version of `package`, alone, below `folder`; the
    package itself stays the installed one."""
    wanted = f"{package}=={version(package)}"
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:",
                    "--dest", str(folder), wanted], check=True, stdin=subprocess.DEVNULL)
    (archive,) = folder.glob(f"{package}-*.tar.gz")
    with tarfile.open(archive) as tar:
        top = archive.name.removesuffix(".tar.gz")
        members = [member for member in tar.getmembers() if member.name.startswith(f"{top}/t/")]
        for member in members:
            member.name = member.name.removeprefix(f"{top}/")
            tar.extract(member, folder)
    return folder / "t"


def run_pytest(name: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Result:
    """One pytest process in `folder`, its output passed on."""
    report = folder / f"{name}.xml"
    scripts = sysconfig.get_path("scripts")
    path = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    modules = os.pathsep.join([str(folder), str(ROOT)])
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(folder / "pytest.ini"), "-q",
         f"--junitxml={report}", *arguments],
        cwd=folder, env={**os.environ, "PATH": path, "PYTHONPATH": modules, **environment}, stdin=subprocess.DEVNULL,
        check=False)
    return read_report(name, report, time.monotonic() - began)


def read_report(name: str, report: Path, seconds: float) -> Result:
    """What pytest wrote with `--junitxml`."""
    if not report.exists():
        return Result(name, 0, (), 0, seconds, finished=False)
    outcomes: dict[str, str] = {}  # a test that is run again is there again: the last time counts
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        test = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            outcomes[test] = "failed"
        else:
            outcomes[test] = "passed" if case.find("skipped") is None else "skipped"
    counts = Counter(outcomes.values())
    failed = tuple(test for test, outcome in outcomes.items() if outcome == "failed")
    return Result(name, counts["passed"], failed, counts["skipped"], seconds, finished=True)


def print_summary(results: Sequence[Result], known: Mapping[str, str]) -> int:
    """A table, the failures with their known cause; the exit status."""
    print(f"\n{'':36}{'passed':>7}{'failed':>7}{'skipped':>8}{'seconds':>9}")
    for result in results:
        print(f"{result.name:36}{result.passed:7}{len(result.failed):7}{result.skipped:8}{result.seconds:9.1f}")
    print(f"{'all':36}{sum(r.passed for r in results):7}{sum(len(r.failed) for r in results):7}"
          f"{sum(r.skipped for r in results):8}{sum(r.seconds for r in results):9.1f}")
    for result in results:
        for name in result.failed:
            print(f"failed: {name}: {known.get(name, 'NOT EXPECTED')}")
    unexpected = [name for result in results for name in result.unexpected(known)]
    return 1 if unexpected or not results else 0


@contextmanager
def arranged(package: str, kind: str) -> Iterator[tuple[Path, RedisServer, RedisServer]]:
    """A folder with the tests of `package`, a broker and another server for results."""
    with TemporaryDirectory(prefix="upstream-") as place, RedisServer(kind) as broker, RedisServer(kind) as results:
        unpack_tests(package, Path(place))
        yield Path(place), broker, results


def parser(description: str) -> argparse.ArgumentParser:
    """The options that both suites have."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--scheme", default="redis-streams", help="URL scheme; `redis` is Kombu's own transport")
    found.add_argument("--server", default="valkey", metavar="KIND", help="see streambroker.testing.servers")
    found.add_argument("--list", action="store_true", help="only name what could be run")
    found.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    return found
