"""The soak's Celery application: `celery -A integration.soak.celery_app worker`."""

from __future__ import annotations

from typing import Any

from celery import Celery, Task
from kombu import Queue

from integration.soak.jobs import QUEUES, Again, Job, Settings, perform
from streambroker.kombu import DURABLE

SETTINGS = Settings.read()
app = Celery("soak", broker=SETTINGS.url)
app.conf.update(
    DURABLE, broker_transport_options=SETTINGS.options, broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None, task_ignore_result=True, task_default_queue=QUEUES[0],
    task_queues=[Queue(name, routing_key=name) for name in QUEUES],
    # by default Celery rejects a job whose retry it could not publish within a second
    task_publish_retry_policy={"max_retries": 12, "interval_start": 0.2, "interval_step": 0.5, "interval_max": 3.0})


@app.task(name="soak", bind=True, max_retries=None)
def soak(self: Task, job: str, kind: str, seconds: float, retries: int, padding: str = "") -> None:
    try:
        perform(SETTINGS, job, kind, seconds, retries, self.request.retries)
    except Again as again:
        raise self.retry(countdown=again.delay) from None


def publish(job: Job) -> None:
    """One message, or an error: Celery's own repeats would be further messages."""
    options: dict[str, Any] = {"countdown": job.delay} if job.delay else {}
    soak.apply_async((job.id, job.kind, job.seconds, job.retries, "x" * job.padding), queue=job.queue,
                     priority=job.priority * 3, retry=False, **options)
