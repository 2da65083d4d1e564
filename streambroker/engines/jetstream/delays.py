"""Messages that wait for their time.

Servers of 2.12 and later bring those of durable queues themselves, by a schedule. All others lie in a stream of their
own, `<p>.l.<q>.<step>.<job>.<due>`, and a relay, which every consuming process runs, brings them: it pulls from one
durable, gives back what is not due with the time that is left as its delay, and publishes what is due to its queue,
waiting for the confirmation before the waiting message is removed. The id of that publish makes a repetition harmless.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ...errors import StoreConnectionError, StoreError, StoreUnavailable
from .api import ApiError
from .envelope import Envelope
from .link import Frame, Listener, Reply
from .names import Names, readable, token
from .streams import NANO, SCHEDULES

if TYPE_CHECKING:
    from .engine import JetStreamEngine

MESSAGE_ID = "Nats-Msg-Id"
#: of a message that waits for the relay: where to publish it, and as JSON the queue that its subject does not tell
QUEUE, TARGET = "Queue", "Target"
#: headers of a schedule
SCHEDULE, SCHEDULE_TARGET = "Nats-Schedule", "Nats-Schedule-Target"

#: the server looks at its schedules four times a second: they are set so much earlier, and consumers keep a message
#: until it is due (seconds); shorter delays than BRIEF are the relay's
AHEAD, BRIEF = 0.28, 1.0
#: the durable of all relays
RELAY = "relay"
#: messages in one pull request, how long it lives and how often the server shows that it has it (seconds)
BATCH, EXPIRES, HEARTBEAT = 256, 30, 5
#: what an ended relay had goes to others after this time (seconds)
ACK_WAIT = 3
#: what is due so soon is kept here, and asked back from the server this much early: its timers are late (seconds)
KEEP, EARLY = 0.25, 0.15
#: how often an idle relay looks whether something waits (seconds)
LOOK = 30.0
#: pause after a failure (seconds)
AGAIN = 0.5
#: publishes under way at once
WINDOW = 100
#: below the prefix: what may be named as a target
_TARGET = re.compile(r"\.[qt]\.[A-Za-z0-9_=-]+\.\d{1,3}")
#: the last moment that a schedule can name, in POSIX ms
_END_OF_TIME = 253_402_300_799_000


def mark(message_id: str) -> str:
    """A job's id as a token of its waiting messages' subjects, by which they are found again."""
    return hashlib.blake2b(message_id.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def scheduled_filter(names: Names, queue: str | None = None, job: str = "") -> str:
    """Covers the schedules of a queue, or of all, or those among them that are of one job."""
    return f"{names.root}.d.{'*' if queue is None else token(queue)}.*.{f'{job}.*' if job else '>'}"


def late_filter(names: Names, queue: str | None = None, job: str = "") -> str:
    """The same for what waits for the relay."""
    return f"{names.root}.l.{'*' if queue is None else token(queue)}.*.{f'{job}.*' if job else '>'}"


def job_of(subject: str) -> str:
    """The mark in the subject of a waiting message."""
    parts = subject.split(".")
    return parts[4] if len(parts) > 4 else ""


def delay_frame(engine: JetStreamEngine, queue: str, step: int, delay: float, envelope: Envelope,
                unique: str) -> Frame:
    """The publish of a message that is to be delivered in `delay` seconds, by the server's clock.

    `unique` names this copy: the server drops a second one, and it must be a token of a subject.
    """
    names = engine.names
    due = min(math.ceil((engine.streams.surely_ahead() + delay) * 1000), _END_OF_TIME)
    job = mark(envelope.message.id)
    transient = engine.queues.is_transient(queue)
    target = names.brief(queue, step) if transient else names.ready(queue, step)
    if transient or delay < BRIEF or engine.streams.known_level < SCHEDULES:
        headers = {MESSAGE_ID: unique, TARGET: target}
        if not readable(queue):
            headers[QUEUE] = json.dumps(queue)
        return Frame(f"{names.lately(queue, step)}.{job}.{due}", envelope.encode(), "", headers)
    start = datetime.fromtimestamp(due / 1000 - AHEAD, timezone.utc)
    when = start.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return Frame(names.scheduled(queue, step, f"{job}.{unique}"), envelope._replace(due=due).encode(), "",
                 {MESSAGE_ID: unique, SCHEDULE: f"@at {when}", SCHEDULE_TARGET: target})


def due_of(subject: str) -> float:
    """POSIX time at which a message of the late stream is due; 0 when its subject does not tell."""
    last = subject.rpartition(".")[2]
    return int(last) / 1000 if last.isascii() and last.isdigit() else 0.0


def _queue_in(headers: Mapping[str, str]) -> str:
    try:
        return str(json.loads(headers[QUEUE]))
    except (KeyError, ValueError):
        return ""


class LateRelay:
    """Of one engine, in the link's thread. It costs next to nothing while nothing waits in the late stream."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self._running = False
        #: set by whatever may end a wait: a late publish, the end of a pull, a new connection
        self._changed = asyncio.Event()
        self._seen = False
        self._pulls = 0
        self._left = 0
        self._problem = ""
        self._heard = 0.0
        self._back: list[Frame] = []
        self._kept: dict[str, tuple[Reply, asyncio.TimerHandle]] = {}
        self._due: list[Reply] = []
        self._bringing = False
        self._listeners: list[Listener] = []

    def start(self) -> None:
        if not self._running:
            self._running = True
            self._engine.link.on_connect.append(self._reconnected)
            self._engine.link.spawn(self._run())

    def stop(self) -> None:
        if self._running:
            self._running = False
            self._engine.link.on_connect.remove(self._reconnected)
            self._changed.set()
            for listener in self._listeners:
                listener.close()
            for reply, timer in self._kept.values():
                timer.cancel()
                self._give_back(reply, max(0.001, due_of(reply.subject) - self._engine.streams.now()))
            self._kept.clear()
            self._send_back()

    def _reconnected(self) -> None:
        """The server has forgotten the pull."""
        self._left = 0
        self._changed.set()

    async def _run(self) -> None:
        while self._running:
            if not self._engine.link.connected:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                await self._wait_for_work()
                await self._work()
            except (StoreConnectionError, StoreError) as error:
                if self._running:
                    self._engine.chores.report(f"delayed messages are brought late: {error}", calm=True)
                    await asyncio.sleep(AGAIN)

    # ------------------------------------------------------------------ nothing waits
    async def _stored(self) -> int:
        sent = time.monotonic()
        try:
            info = await self._engine.api.acall(f"STREAM.INFO.{self._engine.names.late}")
        except ApiError as error:
            if error.missing:
                return 0
            raise
        self._engine.streams.measure(info, sent)
        return int(info["state"]["messages"])

    async def _wait_for_work(self) -> None:
        """Returns when the late stream holds something, or a publish to it was seen."""
        self._seen = False
        watcher = await self._engine.link.alisten(f"{self._engine.names.root}.l.>", self._published)
        self._listeners = [watcher]
        try:
            while self._running and not self._seen and not await self._stored():
                self._changed.clear()
                if not self._seen:
                    await self._wait(LOOK)
        finally:
            watcher.close()

    def _published(self, reply: Reply) -> None:
        """It may not be stored yet."""
        self._seen = True
        self._changed.set()

    async def _wait(self, seconds: float) -> bool:
        """Until something changed; False when nothing did in time."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    # ------------------------------------------------------------------ something waits
    async def _work(self) -> None:
        """Pull until the stream is empty. Raises StoreConnectionError, StoreError."""
        link, inbox = self._engine.link, self._engine.link.new_inbox()
        if not self._running:
            return
        await self._make_consumer()
        listener = await link.alisten(f"{inbox}.*", self._arrived)
        self._listeners = [listener]
        try:
            while self._running:
                self._changed.clear()
                if self._left <= 0:
                    self._pull(inbox)
                if not await self._wait(HEARTBEAT):
                    if time.monotonic() - self._heard > 2 * HEARTBEAT + 1:
                        self._left = 0
                    continue
                if self._problem:
                    raise StoreUnavailable(self._problem)
                if self._left <= 0 and not self._due and not self._bringing and not await self._stored():
                    return
        finally:
            self._left = 0
            listener.close()

    async def _make_consumer(self) -> None:
        engine, stream = self._engine, self._engine.names.late
        await engine.streams.aensure(stream)
        config = {"durable_name": RELAY, "name": RELAY, "deliver_policy": "all", "ack_policy": "explicit",
                  "ack_wait": ACK_WAIT * NANO, "max_deliver": -1, "max_ack_pending": -1, "max_waiting": 4096,
                  "replay_policy": "instant"}
        try:
            await engine.api.acall(f"CONSUMER.DURABLE.CREATE.{stream}.{RELAY}",
                                   {"stream_name": stream, "config": config})
        except ApiError as error:
            if error.missing:
                engine.streams.forget(stream)
            raise

    def _pull(self, inbox: str) -> None:
        self._pulls += 1
        self._problem = ""
        body = b'{"batch":%d,"expires":%d,"idle_heartbeat":%d}' % (BATCH, EXPIRES * NANO, HEARTBEAT * NANO)
        request = f"{self._engine.api.prefix}.CONSUMER.MSG.NEXT.{self._engine.names.late}.{RELAY}"
        if not self._engine.link.post([Frame(request, body, f"{inbox}.{self._pulls}")]):
            raise StoreConnectionError("the link broke")
        self._left, self._heard = BATCH, time.monotonic()

    def _arrived(self, reply: Reply) -> None:
        self._heard = time.monotonic()
        if not reply.status:
            self._take(reply)
            self._left -= 1
        elif reply.status != 100 and reply.subject.endswith(f".{self._pulls}"):
            self._left = 0
            if reply.status != 408:
                self._problem = f"{reply.status} {reply.description}"
        if self._left <= 0:
            self._changed.set()

    def _take(self, reply: Reply) -> None:
        left = due_of(reply.subject) - self._engine.streams.surely_past()
        if left > KEEP:
            self._give_back(reply, left - EARLY)
        elif left > 0:
            self._kept[reply.reply] = reply, self._engine.link.call_later(left, lambda: self._ripe(reply))
        else:
            self._due.append(reply)
            if not self._bringing:
                self._bringing = True
                self._engine.link.spawn(self._bring())

    def _ripe(self, reply: Reply) -> None:
        self._kept.pop(reply.reply, None)
        self._take(reply)

    def _give_back(self, reply: Reply, delay: float) -> None:
        if not self._back:
            self._engine.link.call_later(0.0, self._send_back)
        self._back.append(Frame(reply.reply, b'-NAK {"delay":%d}' % int(delay * NANO)))

    def _send_back(self) -> None:
        # what is not sent comes again after ACK_WAIT
        if self._back:
            self._engine.link.post(self._back)
            self._back = []

    async def _bring(self) -> None:
        try:
            while self._due:
                batch, self._due = self._due[:WINDOW], self._due[WINDOW:]
                await asyncio.gather(*(self._bring_one(reply) for reply in batch))
        finally:
            self._bringing = False
            self._changed.set()

    async def _bring_one(self, reply: Reply) -> None:
        engine, names = self._engine, self._engine.names
        headers = reply.headers or {}
        queue = _queue_in(headers) or names.queue_of(reply.subject) or ""
        target = headers.get(TARGET, "")
        if not target.startswith(names.root) or not _TARGET.fullmatch(target, len(names.root)):
            # others can write there too
            target = names.ready(queue, 0)
        stream = names.transient if target.startswith(f"{names.root}.t.") else names.stream(queue)
        unique = headers.get(MESSAGE_ID) or reply.reply
        try:
            await engine.streams.store(Frame(target, reply.data, "", {MESSAGE_ID: f"due-{unique}"}), stream, queue)
        except (StoreConnectionError, StoreError) as error:
            engine.chores.report(f"a delayed message cannot be brought yet: {error}")
            self._give_back(reply, 1.0)
        else:
            engine.link.post([Frame(reply.reply, b"+ACK")])
