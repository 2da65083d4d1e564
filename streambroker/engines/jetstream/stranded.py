"""Messages that a stream holds and their durable believes to be done. A server that is killed may forget that it had
removed what was acknowledged in its last seconds (seen with nats-server 2.15 and sync_interval always), and would keep
it for ever. Nobody can tell such a message from one that was never handed out, so it is put back, as redelivered.

They lie below the durable's floor: everything there is acknowledged. For a moment that is so of each message, so only
those count that lie there at two looks.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from .envelope import decode
from .frames import Frame
from .stored import Stored, ask, get

if TYPE_CHECKING:
    from .engine import JetStreamEngine

#: how many sweeps after a connect look for them, and after that each how many-th and the one behind it: a job that runs
#: for hours may keep the floor below some
LOOKS, RARE = 4, 10
#: least time between two looks that prove it: copies of a cluster may be late (seconds)
APART = 30.0
#: messages of one durable that are looked at
MOST = 1000

#: sequence and time, which name a message also where a stream was made anew
Known = tuple[int, float]


class Stranded:
    """Of one engine and process, in the link's thread."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self._epoch = 0
        self._sweeps = 0
        #: what was seen at the last look, and when (monotonic)
        self._seen: dict[tuple[str, int], set[Known]] = {}
        self._seen_at = 0.0

    async def sweep(self) -> None:
        """To be called about once a minute. Raises StoreError, StoreConnectionError."""
        epoch = self._engine.link.epoch
        if epoch != self._epoch:
            self._epoch, self._sweeps, self._seen = epoch, 0, {}
        self._sweeps += 1
        if self._sweeps > LOOKS and self._sweeps % RARE > 1 or self._seen and time.monotonic() - self._seen_at < APART:
            return
        seen: dict[tuple[str, int], set[Known]] = {}
        for queue in self._engine.consumption.queues():
            for step in self._engine.steps:
                found = await self._below(queue, step)
                if found:
                    before = self._seen.get((queue, step), set())
                    await self._put_back(queue, [each for each in found if _known(each) in before])
                    seen[queue, step] = {_known(each) for each in found}
        self._seen, self._seen_at = seen, time.monotonic()

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
        if stranded:
            engine.chores.say(logging.WARNING, "queue %r: the server kept %d messages that it took for done, as it may "
                              "after it was killed; they are delivered again", queue, len(stranded))
        for each in stranded:
            unique = f"stranded-{stream}-{each.sequence}-{int(each.time * 1000)}"
            copy = Frame(each.subject, _again(each), headers={"Nats-Msg-Id": unique})
            await engine.streams.store(copy, stream, queue)
            await ask(engine, f"STREAM.MSG.DELETE.{stream}", {"seq": each.sequence, "no_erase": True})


def _known(stored: Stored) -> Known:
    return stored.sequence, stored.time


def _again(stored: Stored) -> bytes:
    """The message as one that was delivered before."""
    try:
        envelope = decode(stored.data)
    except ValueError:
        return stored.data
    first = envelope.first or int(stored.time * 1000)
    return envelope._replace(first=first, before=envelope.before + 1, returned=True).encode()
