"""The evening report of a chain of bakeries: every shop's till is read, and all together become one report.

An ordinary Celery application, jobs and results on one NATS server. What is streambroker's: the two URLs and the line
with DURABLE.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery, Task

from streambroker.kombu import DURABLE

SERVER = os.environ.get("BAKERY_SERVER", "jetstream://127.0.0.1:4222")
app = Celery("bakery", broker=SERVER, backend=SERVER)
# A task is acknowledged when it is done and its result is stored: what a crash interrupts runs again elsewhere.
app.conf.update(DURABLE, result_expires=3600)

NOTES = Path(os.environ.get("BAKERY_NOTES", "notes"))


def first_time(what: str) -> bool:
    """Note that something happened; False when it has happened before."""
    NOTES.mkdir(parents=True, exist_ok=True)
    try:
        (NOTES / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@app.task(bind=True, autoretry_for=(TimeoutError,), retry_backoff=1, retry_jitter=False)
def read_till(self: Task, shop: int) -> dict[str, Any]:
    """What the shop has sold. Every seventh till does not answer the first time."""
    if shop % 7 == 0 and first_time(f"till-{shop}-timed-out"):
        raise TimeoutError(f"the till of shop {shop} does not answer")
    self.update_state(state="READING", meta={"shop": shop})
    time.sleep(0.5)
    return {"shop": shop, "rolls": 100 * shop, "by": self.request.hostname}


@app.task
def write_report(tills: list[dict[str, Any]]) -> dict[str, Any]:
    """The body of the chord: gets what all tills returned, in order."""
    first_time("report-was-written")
    return {"shops": len(tills), "rolls": sum(till["rolls"] for till in tills)}
