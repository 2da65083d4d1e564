"""A process that only publishes: `python -m integration.apps.publisher NAME RATE`, jobs NAME-0, NAME-1... of the Celery
application, until the flag file `quiet` is there. What was confirmed is in the ledger.
"""

from __future__ import annotations

import json
import os
import sys
import time

from integration.apps.celery_app import VARIABLE, AppSettings, make_app
from integration.ledger import append


def publish(name: str, rate: float) -> None:
    settings = AppSettings(**json.loads(os.environ[VARIABLE]))
    app, number = make_app(settings), 0
    while not settings.flag("quiet").exists():
        began = time.time()
        app.tasks["work"].delay(f"{name}-{number}")
        append(settings.ledger, "published", f"{name}-{number}", due=0.0)
        number += 1
        time.sleep(max(0.0, began + 1 / rate - time.time()))
    app.close()


if __name__ == "__main__":
    publish(sys.argv[1], float(sys.argv[2]))
