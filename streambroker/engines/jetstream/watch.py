"""Signs of life: renewing leases, answering who asks, driving what must go on though nobody receives."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import StoreConnectionError, StoreError, StoreUnavailable
from ...message import Delivery
from .acks import BUSY
from .advisories import watch_advisories
from .frames import Frame, Reply
from .holder import Phase
from .link import Listener
from .record import Record
from .succession import REFRESH, Succession

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)


#: the link is tried when nothing was answered for this part of the lease, and ended when no answer comes in such a part
#: either, at least and at most after so long (seconds)
PROVE, SHORTEST, LONGEST = 5.0, 1.0, 5.0


class Watch:
    """Of one engine, in the link's thread."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self._running = False
        self._listeners: list[Listener] = []
        self.record = Record(engine, self._rename)
        self.succession = Succession(engine, self.record)
        #: names of what is under way
        self._busy: set[str] = set()
        self._listening = asyncio.Lock()
        engine.streams.on_other = self.made_anew
        self._steps_at = self._listen_at = 0.0

    @property
    def lease(self) -> float:
        return self._engine.lease

    # ------------------------------------------------------------------ start and end
    def start(self) -> None:
        if not self._running:
            self._running = True
            self._engine.link.spawn(self._run())

    async def _run(self) -> None:
        while self._running and not self._engine.closed:
            if self._engine.link.connected:
                self._turn()
            await asyncio.sleep(min(0.5, self.lease / 5))

    def _turn(self) -> None:
        """Nothing waits for another: what is not answered must not keep leases from being renewed."""
        now, engine = time.monotonic(), self._engine
        for consumer in engine.consumption.consumers():
            consumer.look(now)
        if now - engine.link.proved > self.lease / PROVE:
            self._begin("prove", self._prove)
        self._renew()
        if not self._listeners and now >= self._listen_at:
            self._begin("listen", self._listen)
        if engine.consumption.queues() or engine.holder.held:
            if now - self.record.written > self.lease / 3:
                self._begin("write", self.record.write)
            self._begin("look", self.succession.look)
        if now >= self._steps_at and engine.consumption.consumers():
            self._begin("steps", self._look_at_steps)
        if engine.streams.clock_is_old:
            self._begin("clock", self._look_at_clock)

    def _begin(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if name not in self._busy:
            self._busy.add(name)
            self._engine.link.spawn(self._do(name, work))

    async def _do(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except StoreConnectionError as error:
            logger.debug("the watch waits (%s): %s", name, error)
        except StoreError as error:
            self._engine.chores.report(f"the store refuses what a worker needs ({name}): {error}")
        finally:
            self._busy.discard(name)

    async def _listen(self) -> None:
        async with self._listening:
            if self._listeners:
                return
            names, link = self._engine.names, self._engine.link
            # one that is refused is not asked for again at once
            self._listen_at = time.monotonic() + REFRESH
            listeners: list[Listener] = []
            try:
                listeners.append(await link.alisten(names.presence(self._engine.holder.name), self._asked))
                listeners.append(await link.alisten(names.news, self._news))
                listeners += await watch_advisories(self._engine)
            except BaseException:
                for listener in listeners:
                    listener.close()
                raise
            self._listeners = listeners

    async def _look_at_steps(self) -> None:
        """Who told of a new step may have died before, or we were not listening yet."""
        self._steps_at = time.monotonic() + REFRESH
        if await self._engine.queues.steps_changed():
            self._engine.consumption.all_steps_changed()

    async def _look_at_clock(self) -> None:
        sent = time.monotonic()
        self._engine.streams.measure(
            await self._engine.api.acall(f"STREAM.INFO.{self._engine.names.held}"), sent)

    async def join(self) -> None:
        """Be seen by others, and by those who ask whether this process lives first. Raises StoreError,
        StoreConnectionError."""
        await self._listen()
        await self._write()

    async def _write(self) -> None:
        try:
            await self.record.write()
        except StoreUnavailable as error:
            # a store that is full gets room when its messages are consumed
            logger.debug("the record waits: %s", error)

    async def stop(self) -> None:
        """Forget the record; others need not look at it."""
        self._running = False
        await self.record.remove()

    async def consuming_less(self) -> None:
        """Tell it to others."""
        try:
            if self._engine.consumption.queues() or self._engine.holder.held:
                await self.record.write()
            else:
                await self.record.remove()
        except (StoreConnectionError, StoreError) as error:
            logger.debug("cannot tell what is consumed: %s", error)

    def reconnected(self) -> None:
        """The record may be gone with the server, and with it what others know; leases may be over."""
        self.succession.restart()
        self.record.written = float("-inf")
        if self._running:
            self._renew()

    def _rename(self) -> None:
        """Listen on the new name's subject."""
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        self._listen_at = 0.0

    def made_anew(self, stream: str) -> None:
        """In any thread: what was held of it is gone, and its numbers are those of other messages now."""
        for delivery in list(self._engine.holder.held.values()):
            if delivery.place.stream == stream:
                delivery.lost = delivery.settled = True
                self._engine.let_go(delivery)

    # ------------------------------------------------------------------ answering
    def _asked(self, reply: Reply) -> None:
        if reply.data.startswith(b"{"):
            data = self._engine.claims.answer(reply)
        else:
            data = self.record.state(settling=True)[0] if reply.data else b"1"
        if reply.reply:
            self._engine.link.post([Frame(reply.reply, data)])

    def _news(self, reply: Reply) -> None:
        try:
            news = json.loads(reply.data)
        except ValueError:
            return
        if isinstance(news, dict) and "steps" in news:
            self._engine.consumption.steps_changed(str(news["steps"]))
        elif isinstance(news, dict) and "anew" in news:
            self._engine.claims.durable_made_anew()
        else:
            self.succession.changed()

    # ------------------------------------------------------------------ renewing
    async def _prove(self) -> None:
        """A link that died unseen costs leases."""
        await self._engine.link.aprove(max(SHORTEST, min(LONGEST, self.lease / PROVE)))

    def _renew(self) -> None:
        now = time.monotonic()
        due: list[Delivery] = []
        unsure: list[Delivery] = []
        for delivery in list(self._engine.holder.held.values()):
            place = delivery.place
            if delivery.settled:
                continue
            if not delivery.place.unsure:
                if now - place.renewed > place.lease / 3:
                    due.append(delivery)
            elif place.phase is Phase.HAS:
                unsure.append(delivery)
        if due:
            self._begin("renew", partial(self._renew_all, due))
        if unsure:
            self._begin("confirm", partial(self._confirm, unsure))

    async def _renew_all(self, due: list[Delivery]) -> None:
        lanes: dict[tuple[str, str], list[Delivery]] = {}
        for delivery in due:
            lanes.setdefault((delivery.place.stream, delivery.place.durable), []).append(delivery)
        await asyncio.gather(*(self._renew_lane(found) for found in lanes.values()))

    async def _confirm(self, unsure: list[Delivery]) -> None:
        """Ask others for them, as one whom others can ask, and renew what is still held here."""
        await self._listen()
        if self.record.written == float("-inf"):
            await self._write()
        await self._engine.claims.confirm(unsure)
        await self._renew_all([each for each in unsure if not each.lost and not each.settled])
        lost = sum(each.lost for each in unsure)
        if lost:
            self._engine.chores.report(f"{lost} messages went to others, since this process was silent for too long")
        for consumer in self._engine.consumption.consumers():
            consumer.wake()

    async def _renew_lane(self, due: list[Delivery]) -> None:
        """Of one consumer of the server: each may be led by another node."""
        try:
            for start in range(0, len(due), 500):
                await self._renew_part(due[start:start + 500])
        except (StoreConnectionError, StoreError) as error:
            logger.debug("leases were not renewed: %s", error)

    async def _renew_part(self, part: list[Delivery]) -> None:
        link, sent = self._engine.link, time.monotonic()
        if not link.post([Frame(each.place.reply, BUSY) for each in part[:-1]]):
            return
        # what was sent before the last one is through when that is answered
        reply = await link.ask(Frame(part[-1].place.reply, BUSY), min(5.0, self.lease / 2))
        if not reply.status:
            for delivery in part:
                delivery.place.renewed = sent
