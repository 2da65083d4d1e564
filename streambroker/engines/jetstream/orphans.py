"""What a dead process was given and had not recorded: it may have died at the very start of a job.

The server does not tell who has a message. But all who live do, and what the server has handed out of a queue of the
dead one and nobody has is an orphan. What is on its way to somebody looks the same for a moment, so that counts which
nobody has at two looks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...errors import StoreConnectionError, StoreError
from .acks import NAK
from .api import ApiError
from .census import Census, take_census
from .frames import Frame
from .stored import get
from .streams import NANO

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

#: between two looks, and between tries while somebody does not answer (seconds)
APART, AGAIN = 0.3, 1.0
#: how long a process may take to say what it has (seconds)
ANSWER = 1.0
#: how late a record may tell of what is held (seconds)
UNTOLD = 1.0
#: messages of one durable that are looked at; more wait for their leases
MOST = 5000
#: messages that are handed back at once
PAGE = 500
#: the part of a lease, and the least, that must be left when a message is handed back (seconds)
LEFT, LEAST = 0.1, 0.5


@dataclass(frozen=True, slots=True)
class Span:
    """A durable of the server: what it has handed out lies between two sequences."""

    stream: str
    durable: str
    subject: str
    first: int
    last: int
    #: the newest of the durable's own numbers
    newest: int
    lease: float


def may_hand_back(lease: float, age: float) -> bool:
    """Whether a lease that began `age` seconds ago surely runs: a late hand-back would hit the next holder."""
    return age <= lease - max(LEAST, lease * LEFT)


async def hand_back(engine: JetStreamEngine, stream: str, durable: str, newest: int, sequences: Iterable[int]) -> int:
    """Tell the server that another process will not settle these; how many they are. `newest` is the last number of the
    durable's own: the server looks at the stream's, and at the durable's only for being one that it has used. Raises
    StoreConnectionError."""
    frames = [Frame(f"$JS.ACK.{stream}.{durable}.1.{sequence}.{newest}.0.0", NAK) for sequence in sorted(sequences)]
    for start in range(0, len(frames), PAGE):
        if not engine.link.post(frames[start:start + PAGE]):
            raise StoreConnectionError("the link broke")
        await asyncio.sleep(0)
    return len(frames)


class Orphans:
    """Of one engine, in the link's thread."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine

    def seek(self, dead: Census) -> None:
        """Hand back, soon, what of its queues nobody has. `dead` is what it last told."""
        self._engine.link.spawn(self._seek(dead, time.monotonic()))

    async def _seek(self, dead: Census, looked: float) -> None:
        old = max(dead.seen + UNTOLD, dead.renewed)
        while not self._engine.closed:
            age = partial(self._age, old, looked)
            try:
                spans = [span for span in await self._spans(dead.queues) if may_hand_back(span.lease, age())]
                if not spans:
                    return
                found = await asyncio.gather(*(self._unheld(span) for span in spans))
                held = await self._held()
                if held is not None and any(found):
                    found = [sequences - held.get((span.stream, span.durable), set())
                             for span, sequences in zip(spans, found, strict=True)]
                    await asyncio.sleep(APART)
                    held = await self._held()
                if held is not None:
                    for span, sequences in zip(spans, found, strict=True):
                        if may_hand_back(span.lease, age()):
                            await self._hand_back(span, sequences - held.get((span.stream, span.durable), set()))
                    return
            except (StoreConnectionError, StoreError) as error:
                logger.debug("cannot look for what %s had: %s", dead.holder, error)
            await asyncio.sleep(AGAIN)

    @staticmethod
    def _age(old: float, looked: float) -> float:
        return old + time.monotonic() - looked

    async def _spans(self, queues: tuple[str, ...]) -> list[Span]:
        """Those that have messages out."""
        places = [(queue, step) for queue in queues for step in self._engine.steps]
        found = await asyncio.gather(*(self._span(queue, step) for queue, step in places))
        return [span for span in found if span is not None]

    async def _span(self, queue: str, step: int) -> Span | None:
        names = self._engine.names
        stream, durable = names.stream(queue), names.durable(queue, step)
        try:
            info = await self._engine.api.acall(f"CONSUMER.INFO.{stream}.{durable}")
        except ApiError as error:
            if error.missing:
                return None
            raise
        if not info["num_ack_pending"]:
            return None
        return Span(stream, durable, names.ready(queue, step), int(info["ack_floor"]["stream_seq"]) + 1,
                    int(info["delivered"]["stream_seq"]), int(info["delivered"]["consumer_seq"]),
                    int(info["config"]["ack_wait"]) / NANO)

    async def _unheld(self, span: Span) -> set[int]:
        """What was handed out and is still there."""
        found: set[int] = set()
        sequence = span.first
        while sequence <= span.last and len(found) < MOST:
            stored = await get(self._engine, span.stream, {"seq": sequence, "next_by_subj": span.subject})
            if stored is None or stored.sequence > span.last:
                break
            found.add(stored.sequence)
            sequence = stored.sequence + 1
        return found

    async def _held(self) -> dict[tuple[str, str], set[int]] | None:
        """By stream and durable; None when somebody did not answer who may live."""
        held: dict[tuple[str, str], set[int]] = {}
        for each in await take_census(self._engine, ANSWER):
            if each.seen:
                return None
            for row in each.held:
                held.setdefault((row.stream, row.durable), set()).add(row.sequence)
        return held

    async def _hand_back(self, span: Span, sequences: set[int]) -> None:
        if sequences:
            self._engine.chores.report(f"{len(sequences)} more of them, which it had only just got", calm=True)
            await hand_back(self._engine, span.stream, span.durable, span.newest, sequences)
