"""The measured application: a task that does one small append to a file, so that executions are counted outside."""

from __future__ import annotations

import json
import os
import struct

from celery import Celery

app = Celery("bench", broker=os.environ.get("BENCH_BROKER", "memory://"))
app.conf.update(task_ignore_result=True, task_acks_late=True, broker_connection_retry_on_startup=True,
                task_default_queue="bench", broker_transport_options=json.loads(os.environ.get("BENCH_OPTIONS", "{}")))
RECORD = struct.Struct("<q")


@app.task(name="bench.count")
def count(number: int) -> None:
    file = os.open(os.environ["BENCH_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, RECORD.pack(number))
    os.close(file)
