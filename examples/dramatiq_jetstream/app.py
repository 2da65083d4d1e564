"""Thumbnails of pictures: one job for each, the urgent ones first, a report when a batch is due.

Ordinary Dramatiq actors. What is streambroker's: the broker and its `max_priority`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import dramatiq

from streambroker.dramatiq import JetStreamBroker

broker = JetStreamBroker(url=os.environ.get("PICTURES_BROKER", "nats://127.0.0.1:4222"), max_priority=1)
dramatiq.set_broker(broker)

ALBUM = Path(os.environ.get("PICTURES_ALBUM", "album"))


class NoPicture(Exception):
    """Trying again changes nothing."""


@dramatiq.actor(min_backoff=500, throws=(NoPicture,))
def thumbnail(name: str) -> None:
    """Writes the same file again when it runs again."""
    if name.endswith(".txt"):
        raise NoPicture(f"{name} is no picture")
    time.sleep(0.3)
    ALBUM.mkdir(parents=True, exist_ok=True)
    (ALBUM / f"{name}.small").write_text(f"{time.time()}\n")


@dramatiq.actor
def report() -> None:
    ALBUM.mkdir(parents=True, exist_ok=True)
    (ALBUM / "report").write_text(f"{len(list(ALBUM.glob('*.small')))} thumbnails\n")
