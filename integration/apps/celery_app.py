"""The Celery application of the integration tests: ordinary tasks that write what they do to the ledger.

Worker processes take their settings from the variable STREAMBROKER_APP (JSON of AppSettings), tests call `make_app`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import Celery, Task, chord
from celery.exceptions import Reject
from kombu import Queue

from integration.ledger import append
from streambroker.real import original

VARIABLE = "STREAMBROKER_APP"
#: what `streambroker.kombu.DURABLE` sets; spelt out so that the same tests run on other transports
LATE = {"task_acks_late": True, "task_reject_on_worker_lost": True, "worker_prefetch_multiplier": 1}


@dataclass(frozen=True)
class AppSettings:
    """`ledger` is the file's path, `flags` a folder: a task waits for or looks at files there. `conf` is Celery's,
    `arguments` are those of some of `queues`."""

    broker: str | list[str]
    ledger: str
    flags: str
    backend: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    conf: dict[str, Any] = field(default_factory=dict)
    queues: list[str] = field(default_factory=list)
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)

    def flag(self, name: str) -> Path:
        return Path(self.flags) / name

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}


def make_app(settings: AppSettings) -> Celery:
    """An application with all tasks; `late` acks unless `conf` says otherwise."""
    app = Celery("integration", broker=settings.broker, backend=settings.backend or None, set_as_current=False)
    app.conf.update(
        broker_transport_options=settings.options, broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None, task_ignore_result=not settings.backend, **LATE)
    app.conf.update(settings.conf)
    if settings.queues:
        app.conf.task_queues = [Queue(name, routing_key=name, queue_arguments=settings.arguments.get(name))
                                for name in settings.queues]
        app.conf.task_default_queue = settings.queues[0]

    def note(kind: str, task: Task, name: str, **facts: Any) -> None:
        append(settings.ledger, kind, name, retries=task.request.retries, host=task.request.hostname, **facts)

    def begin(task: Task, name: str) -> None:
        info = task.request.delivery_info or {}
        note("start", task, name, redelivered=info.get("redelivered"), routing_key=info.get("routing_key"),
             priority=info.get("priority"), headers=_plain(task.request.headers))

    @app.task(name="work", shared=False, bind=True)
    def work(self: Task, name: str, seconds: float = 0.0, padding: str = "") -> str:
        """Sleep `seconds`; returns its name."""
        begin(self, name)
        if seconds:
            time.sleep(seconds)
        note("end", self, name)
        return name

    @app.task(name="spin", shared=False, bind=True)
    def spin(self: Task, name: str, seconds: float) -> None:
        """Burn CPU in Python code."""
        begin(self, name)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(i * i for i in range(1000))
        note("end", self, name)

    @app.task(name="hog", shared=False, bind=True)
    def hog(self: Task, name: str, size: int) -> None:
        """One C call that keeps the interpreter lock; each further `size` doubles its time, 25 is some seconds."""
        begin(self, name)
        re.match(r"(a+)+$", "a" * size + "b")
        note("end", self, name)

    @app.task(name="hold", shared=False, bind=True)
    def hold(self: Task, name: str, flag: str = "release") -> None:
        """Run until the flag file is there."""
        begin(self, name)
        while not settings.flag(flag).exists():
            time.sleep(0.05)
        note("end", self, name)

    @app.task(name="block", shared=False, bind=True)
    def block(self: Task, name: str, flag: str = "release") -> None:
        """As `hold`, but a green pool's event loop stands still meanwhile."""
        begin(self, name)
        while not settings.flag(flag).exists():
            original("time", "sleep")(0.05)
        note("end", self, name)

    @app.task(name="retrying", shared=False, bind=True, max_retries=None)
    def retrying(self: Task, name: str, times: int, countdown: float = 0.0) -> None:
        """Ask for `times` retries, then end."""
        begin(self, name)
        if self.request.retries < times:
            raise self.retry(countdown=countdown)
        note("end", self, name)

    @app.task(name="failing", shared=False, bind=True)
    def failing(self: Task, name: str) -> None:
        """Raise, unless the flag file `fixed` is there."""
        begin(self, name)
        if not settings.flag("fixed").exists():
            raise RuntimeError("as asked")
        note("end", self, name)

    @app.task(name="rejecting", shared=False, bind=True)
    def rejecting(self: Task, name: str, requeue: bool = False, times: int = 1_000_000) -> None:
        """Raise Reject the first `times` times; counted by files among the flags."""
        begin(self, name)
        count = len(list(Path(settings.flags).glob(f"rejected-{name}-*")))
        if count < times:
            settings.flag(f"rejected-{name}-{count}").touch()
            raise Reject("as asked", requeue=requeue)
        note("end", self, name)

    @app.task(name="poison", shared=False, bind=True)
    def poison(self: Task, name: str, pause: float = 0.1) -> None:
        """Kill the own process, unless the flag file `fixed` is there."""
        begin(self, name)
        if not settings.flag("fixed").exists():
            time.sleep(pause)
            note("dying", self, name)
            os.kill(os.getpid(), signal.SIGKILL)
        note("end", self, name)

    @app.task(name="publishing", shared=False, bind=True)
    def publishing(self: Task, name: str, names: list[str]) -> None:
        """Publish a `work` for each of `names`."""
        begin(self, name)
        for each in names:
            work.delay(each)
            append(settings.ledger, "published", each, due=0.0)
        note("end", self, name)

    @app.task(name="add", shared=False, ignore_result=False)
    def add(x: float, y: float) -> float:
        return x + y

    @app.task(name="total", shared=False, bind=True, ignore_result=False)
    def total(self: Task, numbers: list[float], name: str) -> float:
        """The body of a chord."""
        begin(self, name)
        note("end", self, name, total=sum(numbers))
        return sum(numbers)

    return app


def make_chord(app: Celery, name: str, size: int) -> Any:
    """A chord of `size` additions whose body writes to the ledger as `name`; not yet sent."""
    return chord([app.tasks["add"].s(i, 0) for i in range(size)], app.tasks["total"].s(name))


def _plain(headers: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (headers or {}).items() if isinstance(value, (str, int, float, bool))}


if VARIABLE in os.environ:
    app = make_app(AppSettings(**json.loads(os.environ[VARIABLE])))
