"""Who holds what now: all processes are asked, silent ones are told by their records."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import StoreConnectionError
from .frames import Frame

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
    """One process. `seen` is the age of its last sign of life, `renewed` that of its oldest lease."""

    holder: str
    host: str
    pid: int
    queues: tuple[str, ...]
    lease: float
    seen: float
    renewed: float
    held: tuple[Held, ...]


async def take_census(engine: JetStreamEngine, timeout: float) -> list[Census]:
    """In the link's thread. Raises StoreConnectionError, StoreError."""
    names = await engine.watch.succession.peers()
    found = await asyncio.gather(*(_look_at(engine, name, timeout) for name in names))
    return [census for census in found if census is not None]


async def _look_at(engine: JetStreamEngine, name: str, timeout: float) -> Census | None:
    """The process is asked by its own name: where nobody listens any more the server says so at once."""
    try:
        reply = await engine.link.ask(Frame(engine.names.presence(name), b"all"), timeout)
    except StoreConnectionError:
        if not engine.link.connected:
            raise
    else:
        if not reply.status:
            return read(reply.data, 0.0)
    record = await engine.watch.record.read(name)
    if record is None or record[0].get("gone"):
        return None
    age = max(0.0, engine.streams.now() - record[2])
    census = read(json.dumps(record[0]).encode(), age)
    return census if census is not None and age < census.lease + 1 else None


def read(data: bytes, age: float) -> Census | None:
    try:
        told: dict[str, Any] = json.loads(data)
        held = tuple(Held(str(queue), str(row[0]), float(row[1]) + age, int(row[2]), str(stream), str(durable),
                          int(row[0]))
                     for queue, stream, durable, rows in told["held"] for row in rows)
        return Census(str(told["holder"]), str(told["host"]), int(told["pid"]), tuple(sorted(told["queues"])),
                      float(told["lease"]), age, float(told["age"]) + age, held)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        logger.debug("an answer that cannot be read: %s", error)
        return None
