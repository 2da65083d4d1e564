"""One test's Celery: applications to publish with, workers, a ledger, flags."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from integration.apps.celery_app import AppSettings, make_app
from integration.ledger import Ledger
from integration.worker import CeleryWorker


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
        (folder / "flags").mkdir()

    def use(self, broker: str | list[str], *, backend: str = "", conf: dict[str, Any] | None = None,
            queues: list[str] | None = None, **options: Any) -> AppSettings:
        """Settings with this test's prefix, ledger and flags; `options` are transport options."""
        self.settings = AppSettings(
            broker=broker, ledger=str(self.ledger.path), flags=str(self.folder / "flags"), backend=backend,
            options={"global_keyprefix": self.prefix, **options}, conf=conf or {}, queues=queues or [])
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

    def worker(self, name: str = "", *, start: bool = True, **options: Any) -> CeleryWorker:
        """A worker with the settings of the last `use`; started and ready unless `start=False`."""
        worker = CeleryWorker(self.settings, self.folder, name or f"w{len(self.workers)}", **options)
        self.workers.append(worker)
        return worker.start() if start else worker

    def flag(self, name: str) -> None:
        """Raise a flag that tasks look at (`release`, `fixed`)."""
        self.settings.flag(name).touch()

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        for app in self.apps:
            app.close()
            app.pool.force_close_all()
