"""Settlements that are more than an acknowledgement: queued from any thread, sent by the link's own.

What gives a message back first says so in the holder's record and in the book, then tells the server: a crash between
leaves the message with its lease.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ...errors import StoreConnectionError, StoreError
from ...message import DeadLetter, Delivery
from .acks import ACK, NAK, TERM
from .api import ApiError
from .books import Book, Leaving
from .delays import BRIEF, delay_frame
from .envelope import Envelope
from .frames import Frame
from .graves import grave_frame
from .loop import Wake
from .streams import posix

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: how long others wait for more of them (seconds)
TOGETHER = 0.002
#: pause before settlements are tried again that the store did not take, and the longest wait for it to say that it has
#: given messages back (seconds)
AGAIN, LONGEST = 0.5, 2.0
#: messages that are copied elsewhere at once
COPIES = 50
#: two times of one entry differ by less (seconds)
SAME = 0.001


class Settle(NamedTuple):
    """`mode` is back, nack, later, dead or pass (back, and not to us at once). `holder` died with it on trial; `by`
    began to send it away and did not get to the end."""

    mode: str
    delivery: Delivery
    delay: float = 0.0
    reason: str = ""
    holder: str = ""
    by: str = ""

    @classmethod
    def resumed(cls, delivery: Delivery, leaving: Leaving, now: float) -> Settle:
        """What another process has begun, so that the ids of the copies are the same. `now` is POSIX."""
        delivery.count = leaving.deliveries
        delay = 0.0
        if leaving.mode == "later":
            # as long as it goes the same way as the first copy, which may be stored
            delay = max(leaving.due / 1000 - now, min(leaving.delay, BRIEF))
        return cls(leaving.mode, delivery, delay, leaving.reason, leaving.holder, leaving.by)

    def leaving(self, by: str, now: float) -> Leaving:
        """For the book."""
        return Leaving(self.mode, self.reason, self.holder, self.by or by, self.delivery.count,
                       int((now + self.delay) * 1000), self.delay)


class Settles:
    """Of one engine."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self.start()

    def start(self) -> None:
        self._waiting: deque[Settle] = deque()
        self._busy = False
        self._called = Wake()

    def __len__(self) -> int:
        return len(self._engine.acks) + len(self._waiting) + self._busy

    @property
    def returning(self) -> bool:
        """Whether something is on its way back to a queue."""
        return bool(self._waiting or self._busy)

    def wait(self, timeout: float) -> None:
        """Until all is sent, in any thread but the link's."""
        deadline = time.monotonic() + timeout
        while len(self) and self._engine.link.connected and time.monotonic() < deadline:
            time.sleep(0.001)

    def finish(self, patience: float, most: float) -> None:
        """The same, as long as something goes on: `most` seconds, and `patience` without any progress."""
        last, since = len(self), time.monotonic()
        end = since + most
        while len(self) and self._engine.link.connected and time.monotonic() < min(end, since + patience):
            if len(self) < last:
                last, since = len(self), time.monotonic()
            time.sleep(0.001)

    def reconnected(self) -> None:
        """In the link's thread."""
        self._kick()

    # ------------------------------------------------------------------ any thread
    def put(self, settle: Settle) -> None:
        self._waiting.append(settle)
        self._called.ask(lambda: self._engine.link.call_soon(self._soon))

    def _soon(self) -> None:
        # those of one moment go together, in the order of the queue
        self._engine.link.call_later(TOGETHER, self._kick)

    def _kick(self) -> None:
        self._called.on = False
        if self._waiting and not self._busy and self._engine.link.connected:
            self._busy = True
            self._engine.link.spawn(self._work())

    async def _work(self) -> None:
        try:
            while self._waiting:
                batch: list[Settle] = []
                while self._waiting and len(batch) < 500:
                    batch.append(self._waiting.popleft())
                try:
                    await self._settle(batch)
                except (StoreConnectionError, StoreError) as error:
                    # behind the others: one that is never taken must not keep them
                    self._waiting.extend(batch)
                    self._engine.chores.report(f"settlements wait: {error}")
                    self._engine.link.call_later(AGAIN, self._kick)
                    return
        finally:
            self._busy = False

    async def _settle(self, batch: list[Settle]) -> None:
        """Takes out of `batch` what is done, so that the rest can be repeated."""
        engine = self._engine
        await self._drop_lost(batch)
        batch.sort(key=lambda settle: settle.delivery.place.key)
        if any(settle.delivery.place.recorded for settle in batch):
            await engine.watch.record.write()
        books = []
        for settle in batch:
            place = settle.delivery.place
            if settle.mode in ("back", "pass"):
                if not place.returned:
                    place.returned = True
                    book = place.book or Book()
                    place.book = replace(book, returns=book.returns + 1, trial="",
                                         bounces=book.bounces + (settle.mode == "pass"))
                books.append(engine.books.frame(place))
            elif settle.mode in ("dead", "later"):
                books.append(engine.books.frame(place, leaving=settle.leaving(
                    engine.holder.name, engine.streams.now())))
            elif settle.mode == "nack" and place.book is not None and place.book.trial:
                books.append(engine.books.frame(place, trial=""))
        if books:
            await engine.books.write(books)
        leaving = [each for each in batch if each.mode in ("dead", "later")]
        problems: list[Exception] = []
        for start in range(0, len(leaving), COPIES):
            await self._leave(batch, leaving[start:start + COPIES], problems)
        await self._give_back(batch)
        if problems:
            raise problems[0]

    async def _leave(self, batch: list[Settle], leaving: list[Settle], problems: list[Exception]) -> None:
        """They are stored elsewhere, then they leave their queues."""
        async def tried(work: Awaitable[T]) -> T | None:
            try:
                return await work
            except (StoreConnectionError, StoreError) as error:
                problems.append(error)
                return None

        if any(settle.mode == "dead" for settle in leaving):
            await self._engine.streams.aensure(self._engine.names.dead)
        there = await asyncio.gather(*(tried(self._is_there(settle.delivery)) for settle in leaving))
        # all begin at once, in their order: answers to requests may come in any
        copied = await asyncio.gather(*(
            tried(self._copy(settle)) for settle, found in zip(leaving, there, strict=True) if found))
        done = {id(settle) for settle in copied if settle is not None}
        for settle, found in zip(leaving, there, strict=True):
            if found is False or id(settle) in done:
                self._done(batch, settle)

    async def _copy(self, settle: Settle) -> Settle:
        await (self.bury(settle) if settle.mode == "dead" else self._move(settle))
        return settle

    async def _drop_lost(self, batch: list[Settle]) -> None:
        """The link was down, or the store silent, for too long: another process may have taken it."""
        unsure = [each.delivery for each in batch if not each.delivery.lost and each.delivery.place.unsure]
        if unsure:
            await self._engine.claims.confirm(unsure)
        for settle in [each for each in batch if each.delivery.lost]:
            self._done(batch, settle)

    def _done(self, batch: list[Settle], settle: Settle) -> None:
        batch.remove(settle)
        self._engine.holder.drop(settle.delivery)

    async def _give_back(self, batch: list[Settle]) -> None:
        """Once: a repetition, as one that comes late, would take the message from the next holder. What a break loses
        comes back when its lease is over."""
        engine = self._engine
        await self._drop_lost(batch)
        back = [settle for settle in batch if settle.mode in ("back", "pass", "nack")]
        frames = [Frame(settle.delivery.place.reply, NAK if settle.delay <= 0 else
                        b'-NAK {"delay": %d}' % int(settle.delay * 1e9)) for settle in back]
        if not frames:
            return
        if not engine.link.post(frames[:-1]):
            raise StoreConnectionError("the link broke")
        batch[:] = [settle for settle in batch if settle.mode in ("dead", "later")]
        for settle in back:
            engine.holder.drop(settle.delivery)
        try:
            # what was sent before is through when this is answered
            await engine.link.ask(frames[-1], min(LONGEST, engine.settings.socket_timeout))
        except StoreConnectionError as error:
            logger.debug("messages may come back late: %s", error)

    async def _is_there(self, delivery: Delivery) -> bool:
        """Whether it is still stored: its queue may have been deleted, or it was settled before a break."""
        place = delivery.place
        try:
            found = await self._engine.api.acall(f"STREAM.MSG.GET.{place.stream}", {"seq": place.sequence})
        except ApiError as error:
            if error.missing:
                return False
            raise
        # a stream that was made anew counts from the start
        return bool(abs(posix(found["message"]["time"]) - place.entered) < SAME)

    async def bury(self, settle: Settle) -> None:
        """To the dead letters; from the queue only when it is stored there."""
        engine, delivery = self._engine, settle.delivery
        number = await engine.streams.store(
            grave_frame(engine, delivery, settle.reason, settle.holder or settle.by or engine.holder.name),
            engine.names.dead)
        if not engine.link.post([Frame(delivery.place.reply, TERM)]):
            raise StoreConnectionError("the link broke")
        engine.books.close(delivery.place)
        engine.buried(delivery.queue)
        if settle.holder:
            engine.convicted(DeadLetter(delivery.queue, str(number), delivery.message, settle.reason, delivery.count,
                                        delivery.place.first, engine.streams.now(), settle.holder))

    async def _move(self, settle: Settle) -> None:
        """A copy that waits takes its place; the id of the copy keeps a repetition from storing it twice."""
        engine, delivery = self._engine, settle.delivery
        place = delivery.place
        envelope = Envelope(delivery.message, int(place.first * 1000), delivery.count, True,
                            replayed=delivery.replayed)
        unique = f"later-{place.stream}-{place.sequence}-{int(place.entered * 1000)}-{delivery.count}"
        frame = delay_frame(engine, delivery.queue, place.step, settle.delay, envelope, unique)
        stream = engine.stream_of(frame.subject, delivery.queue)
        await engine.streams.aensure(stream, delivery.queue)
        await engine.streams.store(frame, stream, delivery.queue)
        if not engine.link.post([Frame(place.reply, ACK)]):
            raise StoreConnectionError("the link broke")
        engine.books.close(place)


