"""Broadcast queues for the test application, as users write them; for the setting `imports`."""

from __future__ import annotations

import os

from celery import Celery
from kombu import Queue
from kombu.common import Broadcast


def add_broadcast(app: Celery) -> None:
    """Each worker has a copy of every task that is sent to the queue `everyone`."""
    app.conf.task_queues = [Queue("celery", routing_key="celery"), Broadcast("everyone")]


if "STREAMBROKER_APP" in os.environ:
    from integration.apps.celery_app import app

    add_broadcast(app)
