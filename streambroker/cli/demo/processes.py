"""The processes of the demo: each in a session of its own, gone when the demo is gone, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..failures import CommandError
from .ledger import VARIABLE, WORKER_VARIABLE

BROKER_VARIABLE = "STREAMBROKER_DEMO_BROKER"
RESULTS_VARIABLE = "STREAMBROKER_DEMO_RESULTS"

#: reads until the demo is gone, however it went, then ends the session: workers without a store would go on for long
_WATCHER = 'read -r _; kill -KILL -"$1"'
LEDGER = "ledger.jsonl"
#: with these a user's own Celery set-up would get into the demo; empty counts as unset
_FOREIGN = ("BROKER_URL", "RESULT_BACKEND", "LOADER", "CONFIG_MODULE", "WORKDIR", "APP", "DJANGO_SETTINGS_MODULE")


def environment(broker: str, results: str, directory: Path) -> dict[str, str]:
    """Variables of the demo's processes; they leave files only in `directory`."""
    own = {name: "" for name in (*_FOREIGN, *os.environ) if name in _FOREIGN or name.startswith("CELERY_")}
    return {**own, BROKER_VARIABLE: broker, RESULTS_VARIABLE: results, VARIABLE: str(directory / LEDGER),
            "TMPDIR": str(directory)}


def _inherited() -> dict[str, str]:
    """Without the variables by which Dramatiq is tuned."""
    return {name: value for name, value in os.environ.items() if not name.startswith("dramatiq_")}


class Process:
    """A Python module as the first process of a session of its own, with its own log file, started at once."""

    def __init__(self, name: str, module: Sequence[str], directory: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self._log = directory / f"{name}.log"
        self._gone = False
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *module], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**_inherited(), **env, WORKER_VARIABLE: name}, start_new_session=True)
        self._watcher = subprocess.Popen(["/bin/sh", "-c", _WATCHER, "sh", str(self.pid)], stdin=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, start_new_session=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises CommandError when it ended with an error."""
        if self._process.poll():
            end = self._log.read_text(errors="replace").strip().splitlines()[-5:]
            raise CommandError("\n".join([f"{self.name} ended by itself, its last words:", *end]))

    def kill(self) -> None:
        """SIGKILL to the whole tree at once. May be called twice."""
        if self._gone:
            return
        self._gone = True
        # the watcher first: once the process is reaped its number may be anybody's
        self._watcher.kill()
        self._watcher.communicate()
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def ask_to_stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait_stopped(self, timeout: float) -> None:
        """Kills what is left after `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        self.kill()
