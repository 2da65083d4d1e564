"""Asking the store for messages on two connections: `io` carries settlements and takes, `waiter` waits on the bells
while nothing is ready.

A wait is one write, BLPOP and a take behind it: the server runs the take in the moment it is woken, so a message is in
hand after one trip, and nothing is ever handed to a connection that only waits. Nothing here blocks but connecting.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ...errors import StoreConnectionError
from ...message import Delivery
from .link import DEMOTED
from .pipe import Expected, Pipe
from .resp import ReplyError, pack
from .scripts import script
from .takes import to_deliveries

if TYPE_CHECKING:
    from .consumer import RedisConsumer
    from .engine import RedisStreamsEngine

logger = logging.getLogger(__name__)

#: pauses between tries to connect again, the last one again and again
PAUSES = (0.0, 0.1, 0.2, 0.5, 1.0)
#: how long a wait's answer may be late before its link counts as dead
PATIENCE = 5.0
#: how often an idle consumer looks for handed-back messages without their mark
LOOK_EVERY = 30.0
#: pause after a refusal, e.g. while memory is full
REST = 0.5


class Pull:
    """The receiving half of a consumer. Driven by one thread or greenlet at a time."""

    #: whether some queues were not asked since `ask_again`: one take asks all
    left_to_ask = False

    def __init__(self, engine: RedisStreamsEngine, consumer: RedisConsumer) -> None:
        self._engine = engine
        self._settings = engine.settings
        self._consumer = consumer
        self._plan = consumer.plan
        self._outbox = consumer.outbox
        self._io, self._waiter = Pipe(engine.make_link()), Pipe(engine.make_link())
        self.inbox: deque[Delivery] = deque()
        #: messages that an answer under way may bring
        self.outstanding = 0
        self._armed = 0
        #: the last take found less than it could carry
        self._idle = False
        #: the bell that ended the last wait, and those that must ring on for others
        self._rung = b""
        self._ring_on: list[bytes] = []
        self._next_due: float | None = None
        self._next_look = 0.0
        self._down_since: float | None = None
        self._tries = 0
        self._retry_at = 0.0
        self._rest_until = 0.0

    # ------------------------------------------------------------------ one turn
    def turn(self, now: float, limit: int, *, arm: bool = True, take: bool = True) -> None:
        """Read what arrived, send what is due. Raises StoreConnectionError when the store has been out of reach for
        `reconnect_timeout`."""
        self.pump(now)
        if not self._io.is_open and now >= self._retry_at:
            self._reopen(now)
        if self._io.is_open and now >= self._rest_until:
            self.send(now, limit, arm=arm, take=take)

    def pump(self, now: float) -> None:
        for pipe in (self._io, self._waiter):
            try:
                # each answer counts, also those behind one that ends the link
                troubles = [self._answered(expected, reply, pipe) for expected, reply in pipe.poll(now)]
                for trouble in troubles:
                    if trouble is not None:
                        raise trouble
            except StoreConnectionError as error:
                self._broken(pipe, error)

    def send(self, now: float, limit: int, *, arm: bool, take: bool, flush: bool = False) -> None:
        """Settlements that are due (with `flush` all), and a take for the free places in the same write."""
        room = limit - len(self.inbox) - self.outstanding - self._armed
        ask = take and room > 0 and not self._idle and not self.outstanding and bool(self._plan.queues)
        late = now + self._settings.socket_timeout
        parts: list[bytes] = []
        expected: list[Expected] = []
        settle_due = self._outbox.due(now)
        if settle_due is not None and (flush or ask or settle_due <= 0):
            for data, settles in self._engine.packer.pack(self._outbox.take()):
                parts.append(data)
                expected.append(Expected("settle", settles, late))
        for bell in self._ring_on:
            parts.append(pack("RPUSH", bell, "1"))
            expected.append(Expected("ring", None, late))
        self._ring_on = []
        for data in self._plan.refresh(now):
            parts.append(data)
            expected.append(Expected("refresh", None, late))
        if ask:
            data, queues = self._take(now, room)
            parts.append(data)
            expected.append(Expected("take", (room, queues), late))
            self.outstanding += room
        if parts:
            try:
                self._io.send(parts, expected)
            except StoreConnectionError as error:
                self._broken(self._io, error)
                return
        if arm and self._idle and not self._armed and not self.outstanding and room > 0 and self._plan.queues:
            self._arm(now, room)

    def _take(self, now: float, count: int) -> tuple[bytes, list[str]]:
        look = now >= self._next_look
        if look:
            self._next_look = now + LOOK_EVERY
        return self._plan.take(count, look)

    def _arm(self, now: float, room: int) -> None:
        block = self._settings.block_timeout
        if self._next_due is not None:
            block = min(block, max(0.001, self._next_due - now))
        late = now + block + PATIENCE
        take, queues = self._take(now, room)
        try:
            if not self._waiter.is_open:
                self._waiter.open()
            self._armed = room
            self._waiter.send([pack("BLPOP", *self._plan.bells, f"{block:.3f}"), take],
                              [Expected("bell", None, late), Expected("take", (room, queues), late)])
        except StoreConnectionError as error:
            self._broken(self._waiter, error)
            self._rest_until = time.monotonic() + REST / 2

    # ------------------------------------------------------------------ answers
    def _answered(self, expected: Expected, reply: Any, pipe: Pipe) -> StoreConnectionError | None:
        """What makes the link useless."""
        if expected.kind == "take":
            asked, queues = expected.about
            if pipe is self._waiter:
                self._armed = 0
            else:
                self.outstanding -= asked
            if not isinstance(reply, ReplyError):
                self._took(asked, queues, reply)
                if pipe is self._waiter and not self._idle:
                    self._pass_on(queues[reply[-1][0]:])
                return None
        elif expected.kind == "bell":
            self._rung = reply[0] if isinstance(reply, list) else b""
        elif expected.kind == "settle":
            if isinstance(reply, ReplyError):
                self._outbox.give_back(expected.about)
            else:
                self._engine.settled(expected.about, reply)
        return self._refused(reply, pipe) if isinstance(reply, ReplyError) else None

    def _took(self, asked: int, queues: list[str], reply: list[Any]) -> None:
        due_ms = int(reply[0])
        self._next_due = None if due_ms < 0 else time.monotonic() + due_ms / 1000
        if self._next_due is not None:
            self._engine.expect_due(self._plan.queues, self._next_due)
        self._idle = len(reply) - 1 < asked
        self.inbox.extend(to_deliveries(self._engine, self._consumer, queues, reply))

    def _pass_on(self, queues: list[str]) -> None:
        """The places were full before these queues had their turn: what the bell rang for is for another consumer."""
        if self._rung in [self._engine.keys.bell(queue).encode("utf-8", "surrogateescape") for queue in queues]:
            self._ring_on.append(self._rung)

    # ------------------------------------------------------------------ trouble
    def _refused(self, reply: ReplyError, pipe: Pipe) -> StoreConnectionError | None:
        text = str(reply)
        self._idle = False
        word = text.split(" ", 1)[0]
        if word == "NOSCRIPT":
            late = time.monotonic() + self._settings.socket_timeout
            loads = [script(name).load for name in ("take", "done", "settle", "declare")]
            try:
                pipe.send(loads, [Expected("load", None, late) for _ in loads])
            except StoreConnectionError as error:
                return error
            return None
        self._engine.chores.report(f"the store refuses to work for consumers: {text}")
        self._rest_until = time.monotonic() + REST
        return StoreConnectionError(text) if word in DEMOTED else None

    def _broken(self, pipe: Pipe, error: StoreConnectionError) -> None:
        """Forget what was under way: settlements are sent again, taken messages that did not arrive are found by the
        keeper."""
        if self._armed or self.outstanding:
            self._engine.doubt(self._plan.queues)
        self._stop_waiting()
        if pipe is self._io:
            self._io.close()
            for settles in reversed(self._io.abandoned("settle")):
                self._outbox.give_back(settles)
            self._io.forget()
            self.outstanding = 0
            if self._down_since is None:
                self._down_since = time.monotonic()
        self._idle = False
        logger.debug("a consumer's link broke: %s", error)

    def _reopen(self, now: float) -> None:
        try:
            self._io.open()
        except StoreConnectionError as error:
            if self._down_since is None:
                self._down_since = now
            self._retry_at = time.monotonic() + PAUSES[min(self._tries, len(PAUSES) - 1)]
            self._tries += 1
            if time.monotonic() - self._down_since >= self._settings.reconnect_timeout:
                self._down_since, self._tries = None, 0
                raise StoreConnectionError(f"the store cannot be reached: {error}") from error
            return
        if self._tries:
            self._engine.chores.report("connected again", calm=True)
        self._down_since, self._tries = None, 0

    def _stop_waiting(self) -> None:
        self._waiter.close()
        self._waiter.forget()
        self._armed = 0

    def disarm(self) -> None:
        """Stop waiting. What a take that the server ran in that moment has brought is found by the keeper."""
        if self._armed:
            self.pump(time.monotonic())
        if self._armed:
            self._stop_waiting()
            self._engine.doubt(self._plan.queues)
        self._idle = False

    def ask_again(self) -> None:
        """The queues have changed, or someone wants to know now."""
        self._idle = False

    # ------------------------------------------------------------------ waiting and ending
    @property
    def is_open(self) -> bool:
        return self._io.is_open

    def sources(self) -> list[int]:
        return [pipe.fileno() for pipe in (self._io, self._waiter) if pipe.is_open]

    def answer_sources(self) -> list[int]:
        """Where answers to what was asked come, but for waits."""
        return [self._io.fileno()]

    def due(self, now: float) -> float | None:
        if not self._io.is_open:
            return max(0.0, self._retry_at - now)
        times = [self._rest_until - now if self._rest_until > now else self._outbox.due(now), self._io.due(now),
                 self._waiter.due(now)]
        return min((when for when in times if when is not None), default=None)

    @property
    def waits(self) -> bool:
        """Whether messages may be under way."""
        return bool(self.outstanding or self._armed)

    @property
    def unanswered(self) -> bool:
        return self._io.is_open and not self._io.quiet

    def close(self) -> None:
        """What was not answered goes back to the outbox."""
        for settles in reversed(self._io.abandoned("settle")):
            self._outbox.give_back(settles)
        self._io.close()
        self._io.forget()
        self._stop_waiting()

    def abandon(self) -> None:
        self._io.abandon()
        self._waiter.abandon()
