"""Workers as a user starts them: a command, in a session of its own, with a log file."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from integration.apps.celery_app import AppSettings
from integration.ledger import Ledger
from streambroker.embedded import ServerProcess
from streambroker.testing import faults
from streambroker.testing.servers import wait_until

W = TypeVar("W", bound="WorkerProcess")
ROOT = Path(__file__).resolve().parent.parent
#: what a worker of Celery logs when it is
CELERY_READY = r"@\S+ ready\."


class WorkerProcess:
    """A worker's command with its children, started by `start` and ready when that returns: when `ready`, a regular
    expression, is `processes` more times in its log.

    Kills are noted in the ledger, so that its verdict can explain repeats.
    """

    def __init__(self, argv: Sequence[str | Path], name: str, *, folder: Path, ledger: Ledger, ready: str,
                 env: Mapping[str, str], processes: int = 1) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.ledger = ledger
        self.starts = 0
        self._pattern = ready
        self._ready_at = 0
        self._processes = processes
        self._process = ServerProcess(argv, log=self.log, ready=lambda: self.count(ready) >= self._ready_at,
                                      env={"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **env})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.alive

    def start(self: W, timeout: float = 40.0, *, wait: bool = True) -> W:
        """Start, again too; with `wait` return when its log says ready. Raises StoreUnavailable with the log's end."""
        self.starts += 1
        self._ready_at = self.count(self._pattern) + self._processes
        self._process.launch()
        if wait:
            self.wait_ready(timeout)
        return self

    def wait_ready(self, timeout: float = 40.0) -> None:
        """Return when its log says ready. Raises StoreUnavailable with the log's end."""
        self._process.wait_ready(timeout)

    def pids(self) -> list[int]:
        """The worker's process and all its children that live."""
        found = []
        for process in psutil.process_iter(["pid", "status"]):
            try:
                if os.getsid(process.pid) == self.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except (ProcessLookupError, PermissionError):
                continue
        return sorted(found)

    def children(self) -> list[int]:
        return [pid for pid in self.pids() if pid != self.pid]

    def memory(self) -> int:
        """Resident bytes of the whole tree."""
        return sum(psutil.Process(pid).memory_info().rss for pid in self.pids())

    def kill(self, pids: Sequence[int] | None = None) -> None:
        """SIGKILL the whole tree at once, or only `pids` of it; noted in the ledger."""
        targets = self.pids() if pids is None else list(pids)
        self.ledger.killed(targets)
        faults.done["process killed"] += 1
        self._signal(signal.SIGKILL, targets)
        if pids is None:
            self._process.kill()

    def ask_to_stop(self, number: int = signal.SIGTERM) -> None:
        """Send `number` to the worker's process."""
        if number == signal.SIGQUIT:
            # a cold stop cuts running tasks short: their second start is not unexplained
            self.ledger.killed(self.pids())
            faults.done["process killed"] += 1
        self._process.signal(number)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30.0) -> float:
        """`stop_all` of this one."""
        return stop_all([self], number, timeout)[0]

    def signal(self, number: int) -> None:
        """To the worker's own process only."""
        self._process.signal(number)

    def signal_child(self, pid: int, number: int) -> None:
        """To one of `children`; that it ends by it is noted in the ledger."""
        self.ledger.killed([pid])
        self._signal(number, [pid])

    def freeze(self) -> None:
        """SIGSTOP the whole tree."""
        faults.done["process frozen"] += 1
        self._signal(signal.SIGSTOP, self.pids())

    def thaw(self) -> None:
        """SIGCONT the whole tree."""
        self._signal(signal.SIGCONT, self.pids())

    def end(self) -> None:
        """Leave nothing behind; also when it was never started."""
        if self.starts:
            left = self.pids()
            self.ledger.killed(left)
            self._signal(signal.SIGKILL, left)
            self._process.kill()

    def text(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def count(self, pattern: str) -> int:
        """How many times a regular expression is in the log."""
        return len(re.findall(pattern, self.text()))

    def wait_log(self, pattern: str, count: int = 1, timeout: float = 30.0) -> None:
        """Wait for the `count`-th match in the log. AssertionError after `timeout` seconds."""
        wait_until(lambda: self.count(pattern) >= count, timeout, f"{count} x {pattern!r} in {self.log}", pause=0.05)

    def _signal(self, number: int, pids: Sequence[int]) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


class CeleryWorker(WorkerProcess):
    """`python -m celery -A integration.apps.celery_app worker`; `options` are further command line options."""

    def __init__(self, settings: AppSettings, folder: Path, name: str = "w", *, pool: str = "prefork",
                 concurrency: int = 2, options: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        super().__init__(
            [sys.executable, "-m", "celery", "-A", "integration.apps.celery_app", "worker", "--pool", pool,
             "--concurrency", str(concurrency), "--hostname", f"{name}@%h", "--loglevel", "INFO", *options],
            name, folder=folder, ledger=Ledger(Path(settings.ledger)), ready=CELERY_READY,
            env={**settings.environment(), **(env or {})})


def stop_all(workers: Sequence[WorkerProcess], number: int = signal.SIGTERM, timeout: float = 30.0) -> list[float]:
    """Send `number` to the process of each and wait for their ends; the seconds that each took. When one takes longer
    than `timeout` all are killed and an AssertionError tells."""
    began = time.monotonic()
    took: dict[str, float] = {}

    def ended() -> bool:
        for worker in workers:
            if not worker.alive:
                took.setdefault(worker.name, time.monotonic() - began)
        return len(took) == len(workers)

    for worker in workers:
        worker.ask_to_stop(number)
    try:
        wait_until(ended, timeout, f"end after signal {number} of each of {[worker.log for worker in workers]}")
    finally:
        for worker in workers:
            worker.end()
    return [took[worker.name] for worker in workers]
