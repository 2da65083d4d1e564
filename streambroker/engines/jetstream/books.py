"""The book of a message: what the server's delivery count does not tell.

It says how often the message came back uncounted, whether it is on trial, and whether it is leaving its queue. Written
before the message goes, so a crash between the two undercounts one delivery and never doubles or buries anything, and
who gets a message next that was about to leave ends that. Only messages that were delivered before are looked up.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import StoreConnectionError, StoreError, StoreUnavailable
from .api import ApiError
from .frames import Frame
from .loop import Wake
from .stored import get, subjects
from .streams import MESSAGE_TTL

if TYPE_CHECKING:
    from .engine import JetStreamEngine
    from .holder import Place

logger = logging.getLogger(__name__)

#: seconds after which a server that can drops a book by itself
KEEP = 30 * 86400
#: look-ups under way at once, and how many books one sweep looks at
WINDOW = 200


class Leaving(NamedTuple):
    """Where a message goes: `mode` is dead or later. `holder` is the worker that died with it, when it is convicted of
    that; `by` who sends it away; `due` the POSIX time in ms until which it waits, `delay` how long that was at first
    (seconds)."""

    mode: str
    reason: str
    holder: str
    by: str
    deliveries: int
    due: int
    delay: float


@dataclass(frozen=True, slots=True)
class Book:
    """`returns`: deliveries that do not count. `trial`: who has, or had, the message as its last chance, at delivery
    `at` of the server's count, and whether `alone`. `bounces`: how often it was passed on to others. `leaving`: its
    copy elsewhere is stored, or was about to be."""

    returns: int = 0
    trial: str = ""
    at: int = 0
    alone: bool = False
    bounces: int = 0
    leaving: Leaving | None = None

    def lost_on_trial(self, raw: int) -> bool:
        """Whether the delivery before this one was a trial that nobody ended."""
        return bool(self.trial) and self.at == raw - 1


class Books:
    """In the link's thread, but for `close`."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self.start()

    def start(self) -> None:
        self._closing: deque[str] = deque()
        self._called = Wake()
        self._idle = asyncio.Event()
        self._idle.set()

    async def read(self, places: Sequence[Place]) -> None:
        """Set `place.book` of each."""
        left = list(places)
        if self._engine.settings.replicas == 1:
            replies = await self._engine.link.asks([self._request(place) for place in places], timeout=5.0)
            for place, reply in zip(places, replies, strict=True):
                if reply is not None and reply.status in (0, 404):
                    place.book = _decode(b"" if reply.status else reply.data)
            left = [place for place, reply in zip(places, replies, strict=True)
                    if reply is None or reply.status not in (0, 404)]
        for start in range(0, len(left), WINDOW):
            await asyncio.gather(*(self._read(place) for place in left[start:start + WINDOW]))

    def _request(self, place: Place) -> Frame:
        names = self._engine.names
        return Frame(f"{self._engine.api.prefix}.DIRECT.GET.{names.state}.{names.book(place.stream, place.sequence)}")

    async def _read(self, place: Place) -> None:
        subject = self._engine.names.book(place.stream, place.sequence)
        state = self._engine.names.state
        if self._engine.settings.replicas > 1:
            data = await self._read_of_leader(state, subject)
        else:
            reply = await self._engine.link.ask(self._request(place), timeout=5.0)
            if reply.status not in (0, 404):
                # no leader, or the stream is gone: that tells nothing about the book
                self._engine.streams.forget(state)
                await self._engine.streams.aensure(state)
                raise StoreUnavailable(f"books cannot be read: {reply.description or reply.status}")
            data = b"" if reply.status else reply.data
        place.book = _decode(data)

    async def _read_of_leader(self, state: str, subject: str) -> bytes:
        """A follower may not have it yet."""
        try:
            answer = await self._engine.api.acall(f"STREAM.MSG.GET.{state}", {"last_by_subj": subject})
        except ApiError as error:
            if error.missing:
                return b""
            raise
        return base64.b64decode(answer["message"].get("data", ""))

    def frame(self, place: Place, **changes: Any) -> Frame:
        """Write the book anew."""
        place.book = replace(place.book or Book(), **changes)
        headers = {"Nats-TTL": f"{KEEP}s"} if self._engine.streams.known_level >= MESSAGE_TTL else None
        return Frame(self._engine.names.book(place.stream, place.sequence),
                     json.dumps(asdict(place.book), separators=(",", ":")).encode(), "", headers)

    async def write(self, frames: Sequence[Frame]) -> None:
        """Returns when they are stored. Raises StoreError, StoreConnectionError."""
        await self._engine.streams.aensure(self._engine.names.state)
        await self._engine.streams.store_all(frames, self._engine.names.state)

    # ------------------------------------------------------------------ the end of a book
    def close(self, place: Place) -> None:
        """The message is gone. From any thread."""
        if place.book is not None and place.book != Book():
            self._closing.append(self._engine.names.book(place.stream, place.sequence))
            self._called.ask(lambda: self._engine.link.call_soon(self._begin))

    def _begin(self) -> None:
        self._called.on = False
        if self._idle.is_set():
            self._idle.clear()
            self._engine.link.spawn(self._purge_all())

    async def finish(self) -> None:
        """Return when all books are closed that were to be."""
        await self._idle.wait()

    async def sweep(self) -> None:
        """Close those of messages whose holder ended between his acknowledgement and that, some at a time."""
        names = self._engine.names
        there = sorted(await subjects(self._engine, names.state, names.books()))
        await asyncio.gather(*(self._look_at(subject) for subject in random.sample(there, min(WINDOW, len(there)))))

    async def _look_at(self, subject: str) -> None:
        stream, sequence = self._engine.names.of_book(subject)
        if await get(self._engine, stream, {"seq": sequence}) is None:
            await self._purge(subject)

    async def _purge_all(self) -> None:
        try:
            while self._closing:
                part = [self._closing.popleft() for _ in range(min(WINDOW, len(self._closing)))]
                await asyncio.gather(*map(self._purge, part))
        finally:
            self._idle.set()

    async def _purge(self, subject: str) -> None:
        try:
            await self._engine.api.acall(f"STREAM.PURGE.{self._engine.names.state}", {"filter": subject})
        except (StoreConnectionError, StoreError) as error:
            logger.debug("book %s is left: %s", subject, error)


def _decode(data: bytes) -> Book:
    try:
        found = json.loads(data)
        leaving = found.get("leaving")
        return Book(int(found["returns"]), str(found["trial"]), int(found["at"]), bool(found["alone"]),
                    int(found["bounces"]), None if leaving is None else Leaving(*leaving))
    except (ValueError, KeyError, TypeError):
        return Book()
