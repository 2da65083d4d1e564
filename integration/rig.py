"""One test's Celery: applications to publish with, workers, a ledger, flags."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from integration.apps.celery_app import AppSettings, make_app
from integration.ledger import Ledger
from integration.worker import CeleryWorker, stop_all
from streambroker.connection import connect
from streambroker.engine import Engine
from streambroker.message import QueueStats
from streambroker.testing.servers import wait_until


class CeleryRig:
    """Starts workers of one test and ends them all.

    `use(url, ...)` says which broker and configuration, `app` publishes with it, `worker(...)` starts a command.
    """

    def __init__(self, folder: Path, ledger: Ledger, prefix: str) -> None:
        self.folder = folder
        self.ledger = ledger
        self.prefix = prefix
        self.workers: list[CeleryWorker] = []
        self.apps: list[Any] = []
        self._engine: Engine | None = None
        (folder / "flags").mkdir()

    def use(self, broker: str | list[str], *, backend: str = "", conf: dict[str, Any] | None = None,
            queues: list[str] | None = None, arguments: dict[str, dict[str, Any]] | None = None,
            **options: Any) -> AppSettings:
        """Settings with this test's prefix, ledger and flags; `arguments` are those of queues, `options` are transport
        options."""
        self.settings = AppSettings(
            broker=broker, ledger=str(self.ledger.path), flags=str(self.folder / "flags"), backend=backend,
            options={"global_keyprefix": self.prefix, **options}, conf=conf or {}, queues=queues or [],
            arguments=arguments or {})
        self.app = make_app(self.settings)
        self.apps.append(self.app)
        return self.settings

    def send(self, task: str, name: str, *args: Any, countdown: float | None = None, **options: Any) -> Any:
        """Publish the task `task` with `name` as first argument and note it in the ledger."""
        due = 0.0
        if countdown:
            due = time.time() + countdown
        result = self.app.tasks[task].apply_async((name, *args), countdown=countdown, **options)
        self.ledger.published(name, due)
        return result

    def send_all(self, task: str, names: Iterable[str], *args: Any, countdown: float | None = None,
                 **options: Any) -> list[str]:
        """`send` for each of `names`, many in one round trip; the names."""
        due: dict[str, float] = {}
        with ExitStack() as stack:
            producer = stack.enter_context(self.app.producer_pool.acquire(block=True))
            if hasattr(producer, "batch"):  # Kombu 5.7 up
                stack.enter_context(producer.batch(500))
            for name in names:
                due[name] = time.time() + countdown if countdown else 0.0
                self.app.tasks[task].apply_async((name, *args), countdown=countdown, producer=producer, **options)
        for name, when in due.items():
            self.ledger.published(name, when)
        return list(due)

    def worker(self, name: str = "", *, start: bool = True, **options: Any) -> CeleryWorker:
        """A worker with the settings of the last `use`; started and ready unless `start=False`."""
        worker = CeleryWorker(self.settings, self.folder, name or f"w{len(self.workers)}", **options)
        self.workers.append(worker)
        return worker.start() if start else worker

    def start(self, *workers: CeleryWorker) -> None:
        """Start them at once and return when all are ready."""
        for worker in workers:
            worker.start(wait=False)
        for worker in workers:
            worker.wait_ready()

    def finish(self) -> None:
        """Stop all that still run, cleanly."""
        stop_all([worker for worker in self.workers if worker.starts and worker.alive])

    @property
    def engine(self) -> Engine:
        """For a look at the store, with the settings that are in use when it is first asked for."""
        if self._engine is None:
            broker = self.settings.broker
            self._engine = connect(broker if isinstance(broker, str) else broker[0], **self.settings.options)
        return self._engine

    def stats(self, queue: str = "celery") -> QueueStats:
        return self.engine.inspector().stats(queue)

    def wait_stats(self, queue: str = "celery", timeout: float = 10.0, **counts: int) -> QueueStats:
        """Wait until the queue's `ready`, `delayed`, `in_flight`, `dead` are as given."""
        def as_wanted() -> bool:
            stats = self.stats(queue)
            return all(getattr(stats, name) == count for name, count in counts.items())

        wait_until(as_wanted, timeout, f"queue {queue} with {counts}", pause=0.05)
        return self.stats(queue)

    def cli(self, *argv: str) -> Any:
        """What `streambroker <argv> --json` prints, on this store. Raises CalledProcessError."""
        done = subprocess.run(
            [sys.executable, "-m", "streambroker", *argv, "--json", "--url", str(self.settings.broker), "--prefix",
             self.prefix], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=True, timeout=60)
        return json.loads(done.stdout)

    def flag(self, name: str) -> None:
        """Raise a flag that tasks look at (`release`, `fixed`)."""
        self.settings.flag(name).touch()

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        if self._engine is not None:
            self._engine.close()
        for app in self.apps:
            app.close()
            app.pool.force_close_all()
