"""Messages that a stream holds and their durable believes to be done. A server that is killed may forget that it had
removed what was acknowledged in its last seconds (seen with nats-server 2.15 and sync_interval always), and would keep
it for ever. Nobody can tell such a message from one that was never handed out, so it is put back, as redelivered.

They lie below the durable's floor: everything there is acknowledged. For a moment that is so of each message, so only
those count that lie there at two looks.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from ...errors import StoreConnectionError, StoreError
from .envelope import decode
from .frames import Frame
from .stored import Stored, ask, get

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

#: pauses before the looks after a connect, the last one again and again: what is still out at first lies above the
#: floor (seconds)
PAUSES = (10.0, 60.0, 600.0)
#: between two looks that prove it; copies of a cluster may be that late (seconds)
APART = 30.0
#: messages of one durable that are looked at
MOST = 1000


class Stranded:
    """Of one engine and process, in the link's thread."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self._epoch = 0
        self._running = False

    def start(self) -> None:
        if not self._running:
            self._running = True
            self._engine.link.spawn(self._run())

    def stop(self) -> None:
        self._running = False

    async def _run(self) -> None:
        turn = 0
        while self._running:
            epoch = self._engine.link.epoch
            turn = turn + 1 if epoch == self._epoch else 0
            self._epoch = epoch
            await asyncio.sleep(PAUSES[min(turn, len(PAUSES) - 1)] * random.uniform(0.9, 1.1))
            if self._running and epoch == self._engine.link.epoch:
                try:
                    await self._look()
                except (StoreConnectionError, StoreError) as error:
                    logger.debug("messages that are stranded are looked for later: %s", error)

    async def _look(self) -> None:
        places = [(queue, step) for queue in self._engine.consumption.queues() for step in self._engine.steps]
        first = {place: found for place in places if (found := await self._below(*place))}
        if not first:
            return
        await asyncio.sleep(APART)
        for (queue, step), before in first.items():
            known = {(each.sequence, each.time) for each in before}
            stranded = [each for each in await self._below(queue, step) if (each.sequence, each.time) in known]
            if stranded:
                await self._put_back(queue, stranded)

    async def _below(self, queue: str, step: int) -> list[Stored]:
        """What the stream has of it below the floor of its durable."""
        engine, names = self._engine, self._engine.names
        stream, subject = names.stream(queue), names.ready(queue, step)
        info = await ask(engine, f"CONSUMER.INFO.{stream}.{names.durable(queue, step)}")
        floor = int(info["ack_floor"]["stream_seq"]) if info is not None else 0
        found: list[Stored] = []
        sequence = 1
        while sequence <= floor and len(found) < MOST:
            stored = await get(engine, stream, {"seq": sequence, "next_by_subj": subject})
            if stored is None or stored.sequence > floor:
                break
            found.append(stored)
            sequence = stored.sequence + 1
        return found

    async def _put_back(self, queue: str, stranded: list[Stored]) -> None:
        """A copy first; its id keeps what several processes do at once from storing it twice."""
        engine = self._engine
        stream = engine.names.stream(queue)
        engine.chores.say(logging.WARNING, "queue %r: the server kept %d messages that it took for done, as it may "
                          "after it was killed; they are delivered again", queue, len(stranded))
        for each in stranded:
            unique = f"stranded-{stream}-{each.sequence}-{int(each.time * 1000)}"
            copy = Frame(each.subject, _again(each), headers={"Nats-Msg-Id": unique})
            await engine.streams.store(copy, stream, queue)
            await ask(engine, f"STREAM.MSG.DELETE.{stream}", {"seq": each.sequence, "no_erase": True})


def _again(stored: Stored) -> bytes:
    """The message as one that was delivered before."""
    try:
        envelope = decode(stored.data)
    except ValueError:
        return stored.data
    first = envelope.first or int(stored.time * 1000)
    return envelope._replace(first=first, before=envelope.before + 1, returned=True).encode()
