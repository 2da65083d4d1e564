"""Actors of the integration tests: `dramatiq integration.apps.dramatiq_app:broker`; settings are in SB_DRAMATIQ."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.middleware import AsyncIO, CurrentMessage

import streambroker.dramatiq
from integration.ledger import append

VARIABLE = "SB_DRAMATIQ"
SETTINGS = json.loads(os.environ[VARIABLE])
broker = getattr(streambroker.dramatiq, SETTINGS["broker"])(**SETTINGS["options"])
broker.add_middleware(CurrentMessage())
broker.add_middleware(AsyncIO())
dramatiq.set_broker(broker)


def note(kind: str, job: str) -> None:
    message = CurrentMessage.get_current_message()
    assert message is not None
    append(SETTINGS["ledger"], kind, job, retries=message.options.get("retries", 0))


class Told(dramatiq.Middleware):
    """Writes down which messages were given up."""

    def after_nack(self, broker: Any, message: Any) -> None:
        append(SETTINGS["ledger"], "nack", message.args[0], error=type(message._exception).__name__)


broker.add_middleware(Told())


def _flag(name: str) -> bool:
    return (Path(SETTINGS["flags"]) / name).exists()


@dramatiq.actor(max_retries=3, min_backoff=50)
def work(job: str, seconds: float = 0.0) -> None:
    note("start", job)
    time.sleep(seconds)
    note("end", job)


@dramatiq.actor
def ends(job: str) -> None:
    note("end", job)


@dramatiq.actor(queue_name="second")
def aside(job: str) -> None:
    note("end", job)


@dramatiq.actor
async def awaits(job: str) -> None:
    note("start", job)
    note("end", job)


@dramatiq.actor
def hold(job: str) -> None:
    """Runs until the flag `release` is there."""
    note("start", job)
    while not _flag("release"):
        time.sleep(0.05)
    note("end", job)


@dramatiq.actor
def spin(job: str) -> None:
    """The same, without ever resting."""
    note("start", job)
    while not _flag("release"):
        sum(range(200_000))
    note("end", job)


@dramatiq.actor
def kills(job: str) -> None:
    """Ends its process."""
    note("start", job)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


@dramatiq.actor
def spawns(job: str) -> None:
    """Enqueues another job."""
    note("start", job)
    work.send(f"{job}/child")
    note("end", job)


def fork_function() -> int:
    """For `--fork-function`: a process of its own that enqueues."""
    from integration.apps import dramatiq_app

    dramatiq_app.work.send("forked")
    time.sleep(3600)
    return 0
