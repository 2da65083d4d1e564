"""Celery and Kombu on streambroker: the transports behind `redis-streams://` and its sisters.

When is a job safe? Celery acknowledges a message *early* by default, when a worker starts the task: whatever is running
or waiting inside a worker that dies by SIGKILL, an out-of-memory kill or a power cut is gone, with every broker. With
*late* acknowledgement the message leaves the store when the task has ended, so the store hands it to another worker
when its worker dies. The price is that a job whose worker dies between its last line and the acknowledgement runs
twice: write tasks so that this does no harm (`task.request.delivery_info["redelivered"]` says that it may be the second
time). `DURABLE` is Celery's own settings for that, and one line in an application:

    app.conf.update(streambroker.kombu.DURABLE)

`task_reject_on_worker_lost` covers the pool process alone, killed in the middle of a task while its worker lives on;
the delivery limit ends what kills every process that touches it. `worker_prefetch_multiplier` 1 keeps waiting messages
where any idle worker can take them. A task that *fails* with an exception is done, not crashed: its failure is its
result; retries are `Task.retry` and `autoretry_for`, as ever.
"""

from __future__ import annotations

from typing import Any

#: Celery settings that turn early acknowledgements into jobs that survive a crash; see above
DURABLE: dict[str, Any] = {
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    "worker_prefetch_multiplier": 1,
}

__all__ = ["DURABLE"]
