"""What happened, told by those who did it: one JSON line an event in a file that is only ever appended to.

Nothing here asks the store, so the store cannot hide a loss or a double.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "STREAMBROKER_DEMO_LEDGER"
WORKER_VARIABLE = "STREAMBROKER_DEMO_WORKER"


@dataclass(frozen=True, slots=True)
class Event:
    """`kind` is published, start or end. `run` names one attempt of a job: the job itself, or `job#1` for its first
    retry. `time` is POSIX."""

    kind: str
    run: str
    worker: str
    pid: int
    time: float


def write(kind: str, *runs: str) -> None:
    """Append events of this process; all in one write, so that they are all there or none."""
    worker, now = os.environ.get(WORKER_VARIABLE, ""), time.time()
    lines = "".join(json.dumps([kind, run, worker, os.getpid(), now]) + "\n" for run in runs)
    file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, lines.encode())
    finally:
        os.close(file)


class Ledger:
    """Reads the file from where it stopped last time. One thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []
        self._read = 0
        path.touch()

    def refresh(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[:data.rfind(b"\n") + 1]
        self._read += len(whole)
        self.events += [Event(*json.loads(line)) for line in whole.splitlines()]

    def runs(self, kind: str) -> set[str]:
        return {event.run for event in self.events if event.kind == kind}

    def running(self, worker: str) -> list[Event]:
        """Starts in `worker` that have no end there."""
        ended = {(event.run, event.pid) for event in self.events if event.kind == "end"}
        return [event for event in self.events if event.kind == "start" and event.worker == worker
                and (event.run, event.pid) not in ended]
