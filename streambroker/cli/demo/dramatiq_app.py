"""The actors of the demo: ordinary ones. Only the broker is streambroker's."""

from __future__ import annotations

import os
import time

import dramatiq
from dramatiq.errors import Retry
from dramatiq.middleware import CurrentMessage

from streambroker.dramatiq import JetStreamBroker, RedisStreamsBroker

from . import ledger
from .processes import BROKER_VARIABLE

_url = os.environ[BROKER_VARIABLE]
broker = JetStreamBroker(url=_url) if _url.startswith("jetstream") else RedisStreamsBroker(url=_url)
broker.add_middleware(CurrentMessage())
dramatiq.set_broker(broker)


@dramatiq.actor
def work(job: str, seconds: float) -> None:
    ledger.write("start", job)
    time.sleep(seconds)
    ledger.write("end", job)


@dramatiq.actor
def flaky(job: str, seconds: float) -> None:
    """Fails the first time and asks to be tried again a second later."""
    message = CurrentMessage.get_current_message()
    retries = message.options.get("retries", 0) if message else 0
    run = f"{job}#{retries}" if retries else job
    ledger.write("start", run)
    time.sleep(seconds)
    ledger.write("end", run)
    if not retries:
        raise Retry(delay=1000)
