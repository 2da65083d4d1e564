"""The processes of a soak, each with a link of its own to the store, and what can be done to them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from integration.ledger import Ledger, append
from integration.soak.jobs import LIMIT, QUEUES, Settings
from integration.stores import Server
from integration.worker import CELERY_READY, WorkerProcess
from streambroker.testing.faults import Proxy
from streambroker.testing.natsserver import NatsServer

#: seconds that a worker may take to start beside everything else, and to end
_START, _STOP = 90.0, 45.0
_THREADS = 2


class Member:
    """A worker or a producer. One thread at a time does things to it."""

    def __init__(self, process: WorkerProcess, proxy: Proxy) -> None:
        self.name = process.name
        self.process = process
        self.proxy = proxy

    def start(self) -> None:
        self.process.start(_START)

    def revive(self) -> bool:
        """Start it again when it has ended by itself, as a supervisor would; whether it had."""
        if self.process.alive:
            return False
        self.process.end()
        self.start()
        return True

    def suffer(self, what: str, seconds: float) -> None:
        """A disturbance by its name. AssertionError when a clean stop takes too long."""
        actions: dict[str, Callable[[float], None]] = {
            "kill": self.kill, "deploy": self.deploy, "cut": self.cut, "hang": self.hang, "freeze": self.freeze}
        actions[what](seconds)

    def kill(self, seconds: float) -> None:
        self.process.kill()
        self.start()

    def deploy(self, seconds: float) -> None:
        """A clean stop, then the next version of it."""
        self.process.stop(timeout=_STOP)
        self.start()

    def cut(self, seconds: float) -> None:
        """Reset its connections, and the new ones too for so long."""
        self.proxy.refuse(seconds > 0)
        self.proxy.reset()
        time.sleep(seconds)
        self.proxy.refuse(False)

    def hang(self, seconds: float) -> None:
        """Its link stays up and nothing gets through."""
        self.proxy.hold()
        time.sleep(seconds)
        self.proxy.release()

    def freeze(self, seconds: float) -> None:
        self.process.freeze()
        time.sleep(seconds)
        self.process.thaw()

    def heal(self) -> None:
        self.proxy.refuse(False)
        self.proxy.release()

    def note_memory(self) -> None:
        """Of the command's own process and of those of its children that live as long as it."""
        try:
            process = psutil.Process(self.process.pid)
            for each in (process, *process.children()):
                append(self.process.ledger.path, "memory", "", worker=self.name, process=each.pid,
                       bytes=each.memory_info().rss)
        except psutil.NoSuchProcess:
            return  # it is being killed or deployed


class Fleet:
    """Workers `w0` (the veteran) to `w2` and producers `p0`, `p1` of one store and one framework."""

    def __init__(self, server: Server, framework: str, folder: Path, ledger: Ledger, *, prefix: str, seed: int,
                 rate: float, lease: float) -> None:
        self.server = server
        self._folder = folder
        self._ledger = ledger
        self._framework = framework
        self._seed = seed
        options = {"prefix": prefix, "visibility_timeout": lease, "max_message_size": LIMIT}
        self.workers = [self._member(name, self._worker_argv(name), options) for name in ("w0", "w1", "w2")]
        # less patient than its outages are long: some publishes raise
        self.producers = [
            self._member(name, [sys.executable, "-m", "integration.soak.producer", framework],
                         {**options, "publish_timeout": 3.0}, rate / 2) for name in ("p0", "p1")]

    @property
    def members(self) -> dict[str, Member]:
        return {member.name: member for member in (*self.workers, *self.producers)}

    def lanes(self) -> dict[str, str]:
        """Target -> lane of the plan."""
        return {"w0": "veteran", **{member.name: "worker" for member in self.workers[1:]},
                **{member.name: "producer" for member in self.producers}}

    def close(self) -> None:
        for member in self.members.values():
            member.process.end()
            member.proxy.close()

    def _member(self, name: str, argv: list[str], options: dict[str, object], rate: float = 0.0) -> Member:
        proxy = Proxy(self.server.port)
        nats = isinstance(self.server, NatsServer)
        settings = Settings(
            "jetstream" if nats else "redis", self._url(proxy.port), str(self._ledger.path), name, self._seed, rate,
            options)
        ready, processes = {"celery": (CELERY_READY, 1), "dramatiq": ("ready for action", _THREADS)}[self._framework]
        if rate:
            ready, processes = "", 0
        return Member(WorkerProcess(argv, name, folder=self._folder, ledger=self._ledger, ready=ready,
                                    env=settings.environment(), processes=processes), proxy)

    def _url(self, port: int) -> str:
        if isinstance(self.server, NatsServer):
            return self.server.url("nats" if self._framework == "dramatiq" else "jetstream", port=port)
        return self.server.url("redis" if self._framework == "dramatiq" else "redis-streams", port=port)

    def _worker_argv(self, name: str) -> list[str]:
        queues = QUEUES[:1] if name == "w0" else QUEUES
        if self._framework == "celery":
            pool = "threads" if name == "w2" else "prefork"
            return [sys.executable, "-m", "celery", "-A", "integration.soak.celery_app", "worker", "--pool", pool,
                    "--concurrency", "2", "--hostname", f"{name}@%h", "--loglevel", "INFO", "-Q", ",".join(queues)]
        return [sys.executable, "-m", "dramatiq", "integration.soak.dramatiq_app:broker", "--processes", "2",
                "--threads", str(_THREADS), "--queues", *queues]


def strike(server: Server, what: str, seconds: float) -> None:
    """End the store, cleanly or not, and start it again on its data after so many seconds."""
    server.kill() if what == "crash" else server.stop()
    time.sleep(seconds)
    server.start()
