"""One durable pull consumer of the server as this process uses it: what was asked of it, what came, what waits here."""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import insort
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...errors import Closed, StoreConnectionError
from ...message import Delivery
from .api import CONSUMER_EXISTS, ApiError
from .frames import Frame, Reply
from .link import Listener
from .streams import NANO

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

#: an idle pull request lives so long at most, and a part of the lease: that of a process which is stopped must be over
#: when its messages come back, or it would get them again; the server shows that it has it this often (seconds)
EXPIRES, OF_LEASE, HEARTBEAT = 30.0, 0.6, 2.0
#: how long it may be silent before it counts as forgotten
SILENCE = 2 * HEARTBEAT + 1
#: how long closing waits for each answer (seconds)
LAST = 1.0
#: how long each try to make a lost durable anew waits: while there is no leader nobody answers (seconds)
AGAIN = 2.0


class Lane:
    """`asked` and `came` count messages of standing requests, each changed by one thread only: whoever holds the
    consumer's lock asks, the link's thread counts what came."""

    def __init__(self, engine: JetStreamEngine, queue: str, step: int, *, durable: bool) -> None:
        names = engine.names
        self._engine = engine
        self.queue = queue
        self.step = step
        self.transient = not durable
        self.stream = names.stream(queue) if durable else names.transient
        self.durable = names.durable(queue, step) if durable else names.transient_durable(queue)
        self.subject = names.ready(queue, step) if durable else names.brief(queue, "*")
        self.lease = engine.lease
        self.inbox = engine.link.new_inbox()
        self._request = f"{engine.api.prefix}.CONSUMER.MSG.NEXT.{self.stream}.{self.durable}"
        self.asked = self.came = 0
        self.heard = 0.0
        #: sequence and time of the newest message that came
        self.newest = (0, 0.0)
        self.listener: Listener | None = None
        self.repairing = False
        #: what arrived and was not handed out, by place
        self.pool: list[Delivery] = []

    # ------------------------------------------------------------------ the server's side
    def open(self, handler: Callable[[Lane, Reply], None]) -> None:
        """Make the durable, listen. Blocks; not for the link's thread."""
        spec = self._engine.queues.known(self.queue)
        if self.transient and spec is not None:
            self._engine.queues.declare(spec)
        elif not self.transient:
            self._engine.streams.ensure(self.stream, self.queue)
            try:
                info = self._engine.api.call(f"CONSUMER.INFO.{self.stream}.{self.durable}")
                made = int(info["config"]["ack_wait"]) >= int(self._engine.lease * NANO)
            except ApiError as error:
                if not error.missing:
                    raise
                self._engine.streams.forget(self.stream)
                self._engine.streams.ensure(self.stream, self.queue)
                made = False
            if not made:
                info = self._engine.api.call(*self._creation())
            self.lease = int(info["config"]["ack_wait"]) / NANO
        self.listener = self._engine.link.listen(f"{self.inbox}.*", lambda reply: handler(self, reply))

    async def remake(self) -> None:
        """The same in the link's thread, after it was found gone."""
        engine = self._engine
        engine.streams.forget(self.stream)
        await engine.streams.aensure(self.stream, self.queue)
        if self.transient:
            await engine.redeclare(self.queue)
            return
        try:
            info = await engine.api.acall(*self._creation(), timeout=AGAIN)
        except ApiError as error:
            if error.code != CONSUMER_EXISTS:
                raise
            info = await engine.api.acall(f"CONSUMER.INFO.{self.stream}.{self.durable}", timeout=AGAIN)
        self.lease = int(info["config"]["ack_wait"]) / NANO

    def _creation(self) -> tuple[str, dict[str, object]]:
        config = {
            "durable_name": self.durable, "name": self.durable, "filter_subject": self.subject,
            "deliver_policy": "all", "ack_policy": "explicit", "ack_wait": int(self._engine.lease * NANO),
            # a limit of the server's own would strand messages in the stream; ours buries them
            "max_deliver": -1,
            # messages that wait for their time must not hold places
            "max_ack_pending": -1, "max_waiting": 4096, "replay_policy": "instant"}
        return (f"CONSUMER.DURABLE.CREATE.{self.stream}.{self.durable}",
                {"stream_name": self.stream, "config": config})

    # ------------------------------------------------------------------ asking
    @property
    def outstanding(self) -> int:
        return self.asked - self.came

    def pull(self, count: int) -> bool:
        """A standing request for `count` messages."""
        if self.outstanding <= 0:
            self.heard = time.monotonic()
        expires = min(EXPIRES, self.lease * OF_LEASE)
        body = b'{"batch":%d,"expires":%d,"idle_heartbeat":%d}' % (
            count, int(expires * NANO), int(min(HEARTBEAT, expires / 3) * NANO))
        if not self._engine.acks.send(Frame(self._request, body, f"{self.inbox}.s")):
            return False
        self.asked += count
        return True

    def pull_now(self, count: int, mark: str) -> bool:
        """What is ready, up to `count`, then a status on `<inbox>.<mark>` unless it was full."""
        return self._engine.link.post([Frame(self._request, b'{"batch":%d,"no_wait":true}' % count,
                                             f"{self.inbox}.{mark}")])

    def forgotten(self, now: float) -> bool:
        return self.outstanding > 0 and now - self.heard > SILENCE

    def reset(self) -> None:
        """The server knows of no request any more."""
        self.came = self.asked

    # ------------------------------------------------------------------ what waits here
    def put(self, delivery: Delivery) -> None:
        pool = self.pool
        if not pool or pool[-1].place.sequence < delivery.place.sequence:
            pool.append(delivery)
        else:
            insort(pool, delivery, key=lambda each: each.place.sequence)


def close_lanes(engine: JetStreamEngine, lanes: Sequence[Lane]) -> None:
    """Listen no more. What the server sent before it knew has arrived when this returns, and it has dropped the
    standing requests: it would try those first with what is given back, and put it behind the rest."""
    open_ones = [(lane, lane.listener) for lane in lanes if lane.listener is not None]
    if not open_ones:
        return

    async def drain() -> None:
        await asyncio.gather(*(listener.drain() for _, listener in open_ones))

    drained = engine.link.connected
    if drained:
        try:
            engine.link.run(drain, LAST)
        except (StoreConnectionError, Closed) as error:
            logger.debug("ending what is asked for: %s", error)
            drained = False
    for _, listener in open_ones:
        listener.close()
    # looking at its requests makes the server drop those that nobody listens for
    looks = [engine.api.frame(f"CONSUMER.INFO.{lane.stream}.{lane.durable}")
             for lane, _ in open_ones if lane.outstanding > 0]
    if drained and looks:
        engine.link.requests(looks, LAST)
