"""The soak's Dramatiq application: `dramatiq integration.soak.dramatiq_app:broker`."""

from __future__ import annotations

from typing import Any

import dramatiq
from dramatiq.errors import Retry
from dramatiq.middleware import CurrentMessage

from integration.soak.jobs import QUEUES, Again, Job, Settings, perform
from streambroker.dramatiq import JetStreamBroker, RedisStreamsBroker

SETTINGS = Settings.read()
#: the highest first
MOST = 3
_IN_MS = ("visibility_timeout", "publish_timeout")
broker = (JetStreamBroker if SETTINGS.engine == "jetstream" else RedisStreamsBroker)(
    url=SETTINGS.url, max_priority=MOST,
    **{name: value * 1000 if name in _IN_MS else value for name, value in SETTINGS.options.items()})
broker.add_middleware(CurrentMessage())
dramatiq.set_broker(broker)


def soak(job: str, kind: str, seconds: float, retries: int, padding: str = "") -> None:
    message = CurrentMessage.get_current_message()
    assert message is not None
    try:
        perform(SETTINGS, job, kind, seconds, retries, message.options.get("retries", 0))
    except Again as again:
        raise Retry(delay=round(again.delay * 1000)) from None


ACTORS = {queue: dramatiq.actor(actor_name=f"soak.{queue}", queue_name=queue, max_retries=10, broker=broker)(soak)
          for queue in QUEUES}


def publish(job: Job) -> None:
    """One message, or an error."""
    options: dict[str, Any] = {"delay": round(job.delay * 1000)} if job.delay else {}
    ACTORS[job.queue].send_with_options(
        args=(job.id, job.kind, job.seconds, job.retries, "x" * job.padding),
        broker_priority=MOST - job.priority, **options)
