"""`streambroker demo` from the outside: its verdict, its time, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from streambroker.embedded import answers_info, answers_ping
from streambroker.testing.servers import wait_until

MARK = "STREAMBROKER_TEST_MARK"


class Run:
    """A `streambroker demo` of which all processes and folders can be found."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        env = {**os.environ, MARK: self.mark, "TMPDIR": str(folder), "CELERY_BROKER_URL": "redis://127.0.0.1:1/9",
               "BROKER_URL": "redis://127.0.0.1:1/9", "CELERY_RESULT_BACKEND": "redis://127.0.0.1:1/9"}
        self.process = subprocess.Popen([sys.executable, "-m", "streambroker", "demo", *argv], env=env, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def processes(self) -> list[psutil.Process]:
        """All that live, the demo's own excepted."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE \
                        and process.pid != self.process.pid:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_line(self, text: str) -> None:
        """Reads its output up to a line with `text`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(f"no {text!r}: {self.process.communicate()}")

    def nothing_left(self) -> None:
        wait_until(lambda: not self.processes(), 10, f"no processes left: {self.processes()}", pause=0.1)
        assert os.listdir(self.folder) == []

    def end(self) -> None:
        for process in self.processes():
            process.kill()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.end()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize(("framework", "engine"), [
    ("celery", "redis"), ("celery", "jetstream"), ("dramatiq", "redis"),
    pytest.param("dramatiq", "jetstream", marks=pytest.mark.long)])
def test_every_job_runs_though_a_worker_is_killed(runs: list[Run], folder: Path, framework: str, engine: str) -> None:
    run = Run(folder, "--json", "--engine", engine, "--framework", framework)
    runs.append(run)
    out, err = run.process.communicate(timeout=100)
    assert run.process.returncode == 0, (out, err)
    told = json.loads(out)
    verdict = told["verdict"]
    assert verdict["published"] == verdict["done"] >= 300
    assert verdict["lost"] == []
    assert all(verdict["doubled"].values())
    assert told["held"] == told["recovered"] > 0
    assert told["seconds"] < 60
    for word in ("queued", "running", "delayed", "recovered", "are killed"):
        assert word in err
    run.nothing_left()


@pytest.mark.parametrize(("engine", "answers"), [
    pytest.param("redis", answers_ping, marks=pytest.mark.long), ("jetstream", answers_info)])
def test_keep_leaves_the_server_and_says_how_to_stop_it(runs: list[Run], folder: Path, engine: str,
                                                        answers: Callable[[tuple[str, int]], bool]) -> None:
    run = Run(folder, "--keep", "--engine", engine)
    runs.append(run)
    out, err = run.process.communicate(timeout=100)
    assert run.process.returncode == 0, (out, err)
    *_, looks, _, stops, _, where = out.splitlines()
    queues = subprocess.run([sys.executable, "-m", *looks.split(), "--json"], capture_output=True, text=True,
                            timeout=30, check=True)
    [celery] = json.loads(queues.stdout)
    assert [celery[name] for name in ("queue", "ready", "delayed", "in_flight", "dead")] == ["celery", 0, 0, 0, 0]
    assert "celery" not in {part for process in run.processes() for part in process.cmdline()}
    subprocess.run(stops, shell=True, check=True, timeout=30)
    port = int(looks.split(":")[-1].split("/")[0])
    wait_until(lambda: not answers(("127.0.0.1", port)), 10, "the server ends")
    wait_until(lambda: not run.processes(), 10, "no processes left", pause=0.1)
    assert "ledger.jsonl" in os.listdir(where.strip())


@pytest.mark.parametrize(("line", "number"), [
    ("two Celery workers start", signal.SIGINT), ("are killed", signal.SIGINT),
    pytest.param("both consume", signal.SIGTERM, marks=pytest.mark.long)],
    ids=["early", "late", "middle"])
def test_it_can_be_interrupted_at_any_time(line: str, number: int, runs: list[Run], folder: Path) -> None:
    run = Run(folder)
    runs.append(run)
    run.wait_line(line)
    run.process.send_signal(number)
    out, err = run.process.communicate(timeout=20)
    assert run.process.returncode == 130, (out, err)
    assert "Traceback" not in err
    run.nothing_left()


def test_nothing_stays_when_the_demo_itself_is_killed(runs: list[Run], folder: Path) -> None:
    run = Run(folder)
    runs.append(run)
    run.wait_line("both consume")
    run.process.kill()
    run.process.communicate()
    wait_until(lambda: not run.processes(), 30, "all processes end", pause=0.1)
