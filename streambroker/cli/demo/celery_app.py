"""The application of the demo for Celery: an ordinary Celery application. Only the broker URL is streambroker's."""

from __future__ import annotations

import os
import time

from celery import Celery, Task

from streambroker.kombu import DURABLE

from . import ledger
from .processes import BROKER_VARIABLE, RESULTS_VARIABLE

app = Celery("demo", broker=os.environ[BROKER_VARIABLE], backend=os.environ[RESULTS_VARIABLE])
app.conf.update(DURABLE)


@app.task
def work(job: str, seconds: float) -> float:
    ledger.write("start", job)
    time.sleep(seconds)
    ledger.write("end", job)
    return seconds


@app.task(bind=True)
def flaky(self: Task, job: str, seconds: float) -> None:
    """Fails the first time and asks to be tried again a second later."""
    run = f"{job}#{self.request.retries}" if self.request.retries else job
    ledger.write("start", run)
    time.sleep(seconds)
    ledger.write("end", run)
    if not self.request.retries:
        raise self.retry(countdown=1)


@app.task
def total(parts: list[float], job: str) -> float:
    ledger.write("start", job)
    ledger.write("end", job)
    return sum(parts)
