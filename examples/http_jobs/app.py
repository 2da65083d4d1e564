"""Price quotes of a print shop: jobs that take some seconds, asked for over HTTP."""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery

from streambroker.kombu import DURABLE

SERVER = os.environ.get("PRINTSHOP_SERVER", "jetstream://127.0.0.1:4222")
app = Celery("printshop", broker=SERVER, backend=SERVER)
app.conf.update(DURABLE, result_expires=3600)


@app.task
def quote(pages: int) -> dict[str, Any]:
    """May run twice when a worker is killed, with the same result."""
    if pages < 1:
        raise ValueError("a print job has at least one page")
    time.sleep(float(os.environ.get("PRINTSHOP_SECONDS", "1")))
    return {"pages": pages, "cents": 150 + 8 * pages}
