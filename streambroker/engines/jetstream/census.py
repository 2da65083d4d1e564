"""Who holds what now: all processes are asked, silent ones are told by their records."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .frames import Frame, Reply

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Held:
    queue: str
    id: str
    age: float
    count: int
    stream: str
    durable: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Census:
    """One process. `seen` is the age of its last sign of life."""

    holder: str
    host: str
    pid: int
    queues: tuple[str, ...]
    lease: float
    seen: float
    held: tuple[Held, ...]


async def take_census(engine: JetStreamEngine, timeout: float) -> list[Census]:
    """In the link's thread. Raises StoreConnectionError, StoreError."""
    expected = set(await engine.watch.succession.peers())
    if not expected:
        return []
    found: dict[str, Census] = {}
    done = asyncio.Event()

    def answered(reply: Reply) -> None:
        if reply.status:
            done.set()
            return
        census = read(reply.data, 0.0)
        if census is not None:
            found[census.holder] = census
            if expected <= found.keys():
                done.set()

    inbox = engine.link.new_inbox()
    listener = await engine.link.alisten(inbox, answered)
    try:
        if engine.link.post([Frame(engine.names.everyone, b"all", inbox)]):
            await asyncio.wait_for(done.wait(), timeout)
    except asyncio.TimeoutError:
        pass
    finally:
        listener.close()
    for name in expected - found.keys():
        record = await engine.watch.record.read(name)
        if record is not None and not record[0].get("gone"):
            age = max(0.0, engine.streams.now() - record[2])
            census = read(json.dumps(record[0]).encode(), age)
            if census is not None and age < census.lease + 1:
                found[name] = census
    return [found[name] for name in sorted(found)]


def read(data: bytes, age: float) -> Census | None:
    try:
        told: dict[str, Any] = json.loads(data)
        held = tuple(Held(str(row[0]), str(row[1]), float(row[2]) + age, int(row[3]), str(row[4]), str(row[5]),
                          int(row[6])) for row in told["held"])
        return Census(str(told["holder"]), str(told["host"]), int(told["pid"]), tuple(sorted(told["queues"])),
                      float(told["lease"]), age, held)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        logger.debug("an answer that cannot be read: %s", error)
        return None
