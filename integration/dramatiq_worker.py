"""Dramatiq's command as a user starts it, in a session of its own, with a log file."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from integration.ledger import Ledger, Verdict
from streambroker.dramatiq import JetStreamBroker, RedisStreamsBroker, StreamBroker
from streambroker.embedded import ServerProcess
from streambroker.testing import faults
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import RedisServer, wait_until

ROOT = Path(__file__).resolve().parent.parent
#: what each worker process says
READY = "ready for action"
APP = "integration.apps.dramatiq_app"


def dramatiq_place(server: RedisServer | NatsServer, port: int = 0) -> tuple[type[StreamBroker], str]:
    """The broker for that server and its URL; `port` puts a proxy's in its place."""
    if isinstance(server, NatsServer):
        return JetStreamBroker, server.url(port=port).replace("jetstream://", "nats://")
    return RedisStreamsBroker, server.url(port=port).replace("redis-streams://", "redis://")


class DramatiqRig:
    """One test's Dramatiq: brokers to look and publish with, commands, a ledger, flags. Ends them all."""

    def __init__(self, server: RedisServer | NatsServer, folder: Path, ledger: Ledger, prefix: str,
                 **options: Any) -> None:
        kind, url = dramatiq_place(server)
        self.folder = folder
        self.ledger = ledger
        self.flags = folder / "flags"
        self.flags.mkdir(exist_ok=True)
        self.settings: dict[str, Any] = {
            "broker": kind.__name__, "options": {"url": url, "prefix": prefix, **options},
            "ledger": str(ledger.path), "flags": str(self.flags)}
        self.broker = kind(url=url, prefix=prefix, **options)
        self.broker.declare_queue("default")
        self._others: list[StreamBroker] = []
        self.commands: list[DramatiqCommand] = []

    def another(self) -> StreamBroker:
        """A broker as of another process."""
        self._others.append(type(self.broker)(**self.settings["options"]))
        return self._others[-1]

    def send(self, actor: str, job: str, *args: Any, delay: int | None = None) -> None:
        """Enqueue it and note that in the ledger."""
        from dramatiq import Message

        due = time.time() + delay / 1000 if delay else 0.0
        self.broker.enqueue(Message(queue_name="default", actor_name=actor, args=(job, *args), kwargs={}, options={}),
                            delay=delay)
        self.ledger.published(job, due)

    def finish(self, seconds: float = 5.0) -> Verdict:
        """Return when the queue is empty; no job was lost or began too early."""
        self.broker.join("default", timeout=int(seconds * 1000))
        verdict = self.ledger.verdict()
        assert not verdict.lost, verdict
        assert not verdict.early, verdict
        return verdict

    def command(self, *options: str, processes: int = 1, threads: int = 2, script: str = "dramatiq",
                place: str = f"{APP}:broker") -> DramatiqCommand:
        """Started and ready."""
        command = DramatiqCommand(self, len(self.commands), script, place,
                                  ["--processes", str(processes), "--threads", str(threads), *options])
        self.commands.append(command)
        command.start(processes)
        return command

    def count(self, kind: str, job: str) -> int:
        return sum(line.kind == kind and line.id == job for line in self.ledger.lines())

    def wait(self, kind: str, *jobs: str, seconds: float = 20.0) -> None:
        wait_until(lambda: all(self.count(kind, job) for job in jobs), seconds, f"{kind} of {jobs}", pause=0.02)

    def flag(self, name: str) -> None:
        (self.flags / name).touch()

    def close(self) -> None:
        for command in self.commands:
            command.end()
        for broker in [self.broker, *self._others]:
            broker.close()


class DramatiqCommand:
    """`dramatiq` with its worker processes."""

    def __init__(self, rig: DramatiqRig, number: int, script: str, place: str, options: Sequence[str]) -> None:
        self.log = rig.folder / f"dramatiq{number}.log"
        self._ledger = rig.ledger
        self._ready = 0
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self._process = ServerProcess(
            [sys.executable, str(Path(sys.executable).parent / script), place, *options], log=self.log,
            ready=lambda: self.log.read_text().count(READY) >= self._ready,
            env={**os.environ, "SB_DRAMATIQ": json.dumps(rig.settings), "PYTHONPATH": str(ROOT), "PATH": path})

    def start(self, processes: int) -> None:
        self._ready = processes
        self._process.launch()
        self._process.wait_ready(40)

    @property
    def alive(self) -> bool:
        return self._process.alive

    def pids(self) -> list[int]:
        """The command and all its processes."""
        root = psutil.Process(self._process.pid)
        return [root.pid, *(each.pid for each in root.children(recursive=True))]

    def kill(self) -> None:
        """SIGKILL for all of them at once."""
        faults.done["process killed"] += 1
        pids = self.pids()
        self._ledger.killed(pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.alive, 10, "the command is gone")

    def reload(self) -> None:
        """SIGHUP, and wait until its processes are ready again."""
        before = self.log.read_text().count(READY)
        self.signal(signal.SIGHUP)
        wait_until(lambda: self.log.read_text().count(READY) >= before + self._ready, 40, "it is ready again")

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def stop(self, seconds: float = 30.0) -> None:
        """SIGTERM, and wait for a clean end."""
        self.signal(signal.SIGTERM)
        wait_until(lambda: not self.alive, seconds, "the command ends")

    def end(self) -> None:
        if self.alive:
            for pid in self.pids():
                os.kill(pid, signal.SIGKILL)
        self._process.stop()
