"""From a message of the server to a delivery that may be handed out. In the link's thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from ...errors import StoreConnectionError, StoreError
from ...message import Delivery, Message
from .books import Book
from .claims import DONE
from .envelope import Envelope, decode
from .frames import Reply, read_place
from .holder import Key, Phase, Place
from .lane import Lane
from .settles import Settle

if TYPE_CHECKING:
    from .consumer import JetStreamConsumer
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

#: messages that wait here for their time and take no room
EARLY = 16
#: in the place of a message that waits for its turn
_UNREAD = Message(b"")
#: pause before books are looked up again that could not be read
AGAIN = 0.5


class Intake:
    """Messages that were never delivered before go straight on. Of one that was, others are asked whether they have it,
    and its book is read; what comes after it waits, so that the order stays."""

    def __init__(self, engine: JetStreamEngine, consumer: JetStreamConsumer) -> None:
        self._engine = engine
        self._consumer = consumer
        self._waiting: deque[tuple[Lane, Delivery, bool]] = deque()
        self._early = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def take(self, lane: Lane, reply: Reply, *, surplus: bool) -> None:
        place = self._place(lane, reply)
        if place is None:
            logger.warning("a message without an acknowledgement subject came for %r, it is ignored", lane.queue)
            self._consumer.refund()
            return
        if place.sequence > lane.newest[0]:
            lane.newest = place.sequence, place.entered
        elif place.raw == 1 and place.entered > lane.newest[1]:
            lane.newest = place.sequence, place.entered
            self._engine.watch.made_anew(lane.stream)
        delivery = Delivery(lane.queue, str(place.sequence), _UNREAD, 1, place.raw > 1, place)
        if delivery.place.overdue:
            logger.debug("%s in %s comes too late, its lease is over", delivery.id, delivery.queue)
            self._consumer.refund()
            return
        doubtful = self._engine.claims.doubtful(place)
        if not self._consumer.no_ack:
            if (doubtful or place.key in self._engine.holder.held) and self._is_here(place):
                self._consumer.refund()
                return
            self._engine.holder.hold(delivery)
            self._engine.watch.record.changed()
        if not doubtful and not surplus and self._idle.is_set():
            self._admit(lane, delivery)
            return
        if doubtful and not self._consumer.no_ack:
            place.phase = Phase.ASKS
        self._waiting.append((lane, delivery, surplus))
        if self._idle.is_set():
            self._idle.clear()
            self._engine.link.spawn(self._work())

    def _is_here(self, place: Place) -> bool:
        """Whether this process has it, or is done with it. What runs here keeps the message, unless others took it
        meanwhile, and settles the new delivery."""
        engine = self._engine
        if engine.claims.is_done(place):
            engine.acks.put(place.reply)
            return True
        known = engine.holder.held.get(place.key)
        if known is None or known.lost or known.place.entered != place.entered:
            return False
        logger.debug("%s in %s was delivered again while it is here", known.id, known.queue)
        old = known.place
        old.reply = place.reply
        if old.phase is not Phase.HAS:
            old.raw = max(old.raw, place.raw)
            old.renewed = place.renewed
            return True
        # who had it in between may have it still
        old.doubt = old.doubt or place.raw > old.raw + 1
        engine.claims.again(known, place.raw)
        if not known.place.unsure:
            old.renewed = place.renewed
        return True

    def _place(self, lane: Lane, reply: Reply) -> Place | None:
        told, now = read_place(reply), time.monotonic()
        if told is None:
            return None
        return Place(
            lane.stream, lane.durable, told.sequence, told.raw, reply.reply, told.time, self._consumer, lane.step,
            lane.lease,
            # this process may have been stopped, or the link: it was sent at any time since then
            min(now, self._engine.link.proved), now, data=reply.data)

    async def _work(self) -> None:
        try:
            while self._waiting:
                batch = list(self._waiting)
                self._waiting.clear()
                claims = await self._look_up([delivery.place for _, delivery, _ in batch])
                for lane, delivery, surplus in batch:
                    claim = claims.get(delivery.place.key)
                    if claim == DONE:
                        self._engine.acks.put(delivery.place.reply)
                    if claim or delivery.lost or delivery.place.overdue:
                        self._drop(delivery)
                        continue
                    if delivery.place.phase is not Phase.HAS:
                        delivery.place.phase, delivery.place.doubt = Phase.HAS, False
                    if surplus:
                        self._consumer.refund()
                        self._consumer.hand_back([delivery])
                    else:
                        self._admit(lane, delivery)
        finally:
            self._idle.set()

    async def _look_up(self, places: list[Place]) -> dict[Key, str]:
        """What others say of those that may have been out before; their books are read."""
        engine = self._engine
        doubtful = [place for place in places if place.phase is Phase.ASKS]
        again = [place for place in places if place.raw > 1]
        while doubtful or again:
            try:
                claims, _ = await asyncio.gather(engine.claims.look(doubtful), engine.books.read(again))
                return claims
            except (StoreConnectionError, StoreError) as error:
                logger.debug("cannot look up what came back: %s", error)
                await asyncio.sleep(AGAIN)
        return {}

    def _drop(self, delivery: Delivery) -> None:
        """Without a word: it is another process's, or comes again."""
        delivery.lost = True
        self._engine.let_go(delivery)
        self._consumer.refund()

    async def finish(self) -> None:
        """Return when nothing is being looked up."""
        await self._idle.wait()

    # ------------------------------------------------------------------ one message
    def _admit(self, lane: Lane, delivery: Delivery) -> None:
        engine, place = self._engine, delivery.place
        try:
            envelope = decode(place.data)
        except ValueError as error:
            self._refuse(delivery, f"not a message: {error}")
            return
        place.data = b""
        message = envelope.message
        place.first = envelope.first / 1000 or place.entered
        place.before = envelope.before
        if message.expires is not None:
            place.ends = place.first + message.expires
        spec = engine.queues.known(lane.queue)
        if spec is not None and spec.message_ttl is not None:
            place.ends = min(place.ends, place.entered + spec.message_ttl)
        delivery.message = message
        delivery.replayed = envelope.replayed
        if place.ends != float("inf") and engine.streams.now() >= place.ends:
            engine.expire(delivery, self._consumer)
            self._consumer.refund()
            return
        early = envelope.due / 1000 - engine.streams.surely_past() if envelope.due else 0.0
        if early > 0:
            self._keep(lane, delivery, envelope, early)
            return
        if self._ready(delivery, envelope):
            self._consumer.admit(lane, delivery)

    def _ready(self, delivery: Delivery, envelope: Envelope) -> bool:
        """Whether it may be handed out at all."""
        if delivery.place.raw > 1 or envelope.before or envelope.returned:
            delivery.redelivered = True
            return self._consumer.no_ack or not self._judge(delivery, envelope)
        return True

    def _keep(self, lane: Lane, delivery: Delivery, envelope: Envelope, seconds: float) -> None:
        """The server brings what waited a moment too early. A few of them take no room meanwhile."""
        free = self._early < EARLY
        self._early += 1
        if free:
            self._consumer.refund()
        self._engine.link.call_later(seconds, lambda: self._ripe(lane, delivery, envelope, free=free))

    def _ripe(self, lane: Lane, delivery: Delivery, envelope: Envelope, *, free: bool) -> None:
        self._early -= 1
        if delivery.settled or delivery.lost or self._consumer.closed:
            return
        if free and not self._consumer.make_room():
            self._consumer.hand_back([delivery])
        elif self._ready(delivery, envelope):
            self._consumer.admit(lane, delivery)

    def _judge(self, delivery: Delivery, envelope: Envelope) -> bool:
        """Count it; True when it is none to hand out: it is convicted of having killed its workers, or leaves."""
        engine, place = self._engine, delivery.place
        book = place.book or Book()
        if book.leaving is not None:
            # who sent it away died in the midst of that
            self._leave(delivery, Settle.resumed(delivery, book.leaving, engine.streams.now()))
            return True
        delivery.count = max(1, envelope.before + place.raw - book.returns)
        limit, lost = engine.queues.limit_of(delivery.queue), delivery.count - 1
        if not limit or not lost:
            return False
        if book.lost_on_trial(place.raw) and lost >= limit and (book.alone or lost >= 2 * limit):
            delivery.count = lost
            self._refuse(delivery, f"delivery limit of {limit} reached: its worker died", book.trial)
            return True
        place.last = lost >= (limit - 2 if limit >= 4 else max(1, limit - 1))
        return False

    def _refuse(self, delivery: Delivery, reason: str, holder: str = "") -> None:
        """To the dead letters, unseen."""
        if self._consumer.no_ack:
            self._consumer.refund()
            self._engine.acks.put(delivery.place.reply)
        else:
            self._leave(delivery, Settle("dead", delivery, 0.0, reason, holder))

    def _leave(self, delivery: Delivery, settle: Settle) -> None:
        """It is handed out to nobody."""
        self._consumer.refund()
        delivery.settled = True
        self._engine.let_go(delivery)
        self._engine.settles.put(settle)
