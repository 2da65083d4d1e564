"""A program that publishes until SIGTERM: `python -m integration.soak.producer celery`.

Each job has a line `publishing` in the ledger before, and one after it: `published`, `refused` (too large, nothing was
sent) or `raised` (nobody knows).
"""

from __future__ import annotations

import importlib
import math
import signal
import sys
import threading
import time
from types import FrameType

from integration.ledger import append
from integration.soak.jobs import Job, Settings, stream_of_jobs
from streambroker.errors import MessageTooLarge


def main() -> None:
    settings = Settings.read()
    app = importlib.import_module(f"integration.soak.{sys.argv[1]}_app")
    over = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        over.set()

    signal.signal(signal.SIGTERM, stop)
    next_at = time.monotonic()
    for job in stream_of_jobs(settings.member, settings.seed):
        _publish(app.publish, settings, job)
        # what an outage has held up is not made good for: nothing is overtaken by a flood
        next_at = max(next_at + 1 / settings.rate, time.monotonic())
        if over.wait(next_at - time.monotonic()):
            break


def _publish(publish: object, settings: Settings, job: Job) -> None:
    assert callable(publish)
    # Dramatiq counts whole milliseconds
    due = math.floor(time.time() * 1000) / 1000 + job.delay if job.delay else 0.0
    append(settings.ledger, "publishing", job.id, due=due, job=job.kind)
    try:
        publish(job)
    except MessageTooLarge:
        append(settings.ledger, "refused", job.id)
    except Exception as error:  # noqa: BLE001 - whatever a framework makes of an outage
        append(settings.ledger, "raised", job.id, error=f"{type(error).__name__}: {error}")
    else:
        append(settings.ledger, "published", job.id, due=due)


if __name__ == "__main__":
    main()
