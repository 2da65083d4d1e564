"""Tasks about results, for workers that are started with `--include integration.apps.result_tasks`."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from celery import Celery, Task, chord, group
from celery.signals import task_success

from integration.apps import celery_app
from integration.apps.celery_app import AppSettings
from integration.ledger import append

#: where `fatal` kills its worker: before its result is stored, between that and the ack
WORKED, STORED = "worked", "stored"


def add_tasks(app: Celery, settings: AppSettings) -> None:
    """Also for the program that publishes."""

    def die_once(name: str) -> None:
        flag = settings.flag(f"died-{name}")
        if not flag.exists():
            flag.touch()
            append(settings.ledger, "dying", name)
            os.kill(os.getpid(), signal.SIGKILL)

    @app.task(name="fatal", shared=False, bind=True)
    def fatal(self: Task, name: str, point: str) -> dict[str, Any]:
        """Kills its process at `point`, the first time."""
        append(settings.ledger, "start", name)
        if point == WORKED:
            die_once(name)
        append(settings.ledger, "end", name)
        return {"name": name, "answer": 42}

    @app.task(name="echo", shared=False)
    def echo(value: Any, seconds: float = 0.0) -> Any:
        time.sleep(seconds)
        return value

    @app.task(name="inflate", shared=False)
    def inflate(size: int) -> str:
        return "x" * size

    @app.task(name="wrong", shared=False)
    def wrong(text: str) -> None:
        raise LookupError(text)

    @app.task(name="steps", shared=False, bind=True)
    def steps(self: Task, flag: str) -> str:
        """Tells of its progress and waits for a flag."""
        self.update_state(state="PROGRESS", meta={"half": True})
        while not settings.flag(flag).exists():
            time.sleep(0.02)
        return "done"

    @app.task(name="silent", shared=False, ignore_result=True)
    def silent(name: str) -> str:
        append(settings.ledger, "end", name)
        return name

    @app.task(name="collect", shared=False, bind=True)
    def collect(self: Task, values: list[Any], name: str = "") -> list[Any]:
        """The body of a chord."""
        if name:
            append(settings.ledger, "end", name)
        return values

    @app.task(name="growing", shared=False, bind=True)
    def growing(self: Task, more: int) -> int:
        """A part of a chord that adds others to it."""
        for number in range(more):
            self.add_to_chord(echo.s(100 + number))
        return more

    @app.task(name="replaced", shared=False, bind=True)
    def replaced(self: Task) -> None:
        """Becomes a chord."""
        raise self.replace(chord([echo.s(1), echo.s(2)], collect.s()))

    @app.task(name="nesting", shared=False)
    def nesting(name: str) -> None:
        """Publishes a chord of groups."""
        chord([group(echo.s(1), echo.s(2)), echo.s(3)], collect.s(name)).delay()

    @task_success.connect(weak=False)
    def stored(sender: Task, result: Any, **kwargs: Any) -> None:
        if sender.name == "fatal" and sender.app is app and sender.request.args[1] == STORED:
            die_once(sender.request.args[0])


if hasattr(celery_app, "app"):
    add_tasks(celery_app.app, AppSettings(**json.loads(os.environ[celery_app.VARIABLE])))
