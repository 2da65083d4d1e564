"""Storing messages, each once: a publish without an answer is repeated with the same id, which the server recognizes
for `duplicate_window` seconds."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import AuthenticationError, MessageTooLarge, StoreConnectionError, StoreError, StoreUnavailable
from ...message import Message, QueueSpec
from .admin import is_there
from .api import NOBODY, NOT_NOW, PAUSES, WAITS, ApiError
from .delays import delay_frame
from .envelope import Envelope
from .frames import Frame, Reply
from .names import readable
from .plain import Ticket
from .streams import MESSAGE_TTL
from .unresolved import Unresolved

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

_SEQUENCE = re.compile(rb'"seq": ?(\d+)')
_MESSAGE_ID = "Nats-Msg-Id"
#: the part of the duplicate window in which a publish is repeated
FRESH = 0.9
#: room for subject and headers in the server's limit of a message
OVERHEAD = 1024


class Publisher:
    """Thread-safe."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self._unresolved = Unresolved(str(engine.address), engine.settings.prefix)
        self.start()

    def start(self) -> None:
        """As a new producer."""
        self._name = os.urandom(6).hex()
        self._count = itertools.count(1)
        self._lock = threading.RLock()
        #: what `confirm="deferred"` has left open
        self._open: tuple[str, Sequence[Frame], Ticket] | None = None

    def publish(self, queue: str, messages: Sequence[Message], create: bool) -> list[str]:
        if not messages:
            return []
        for message in messages:
            self._check_size(queue, message)
        spec = self._engine.queues.learn(queue) if create else self._engine.queues.spec(queue)
        if spec is None and not create and not is_there(self._engine, queue):
            return []
        if spec is None and not readable(queue):
            # nothing else would tell its name
            self._engine.queues.declare(QueueSpec(queue))
        last = self._engine.steps[-1]
        for step in {min(message.priority, last) for message in messages}:
            self._engine.queues.tell_step(queue, step)
        window = self._engine.settings.duplicate_window * FRESH
        known = self._unresolved.take(queue, messages, window)
        frames, began = known or ([self._frame(queue, message, spec, last) for message in messages], time.monotonic())
        # known to be there after the first time
        for stream in {self._engine.stream_of(frame.subject, queue) for frame in frames}:
            self._engine.streams.ensure(stream, queue)
        if self._engine.settings.confirm == "deferred":
            return self._defer(queue, frames)
        try:
            ids = self.send(queue, frames, began=began)
        except StoreConnectionError:
            self._unresolved.keep(queue, messages, frames, began)
            raise
        if spec is not None and spec.max_length:
            self._engine.trim(queue, spec.max_length)
        return ids

    def _check_size(self, queue: str, message: Message) -> None:
        size = len(message.body) + len(message.head)
        most = self._engine.settings.max_message_size
        if size > most:
            raise MessageTooLarge(f"a message of {size} bytes for {queue!r} is over max_message_size ({most}); raise "
                                  "the option or store the data elsewhere and send a reference")
        server = self._engine.link.max_payload
        if server and size + OVERHEAD > server:
            raise MessageTooLarge(f"a message of {size} bytes for {queue!r} is over the server's max_payload "
                                  f"({server}, of which {OVERHEAD} are needed for its head); raise it in the server's "
                                  "configuration or store the data elsewhere and send a reference")

    def _frame(self, queue: str, message: Message, spec: QueueSpec | None, last: int) -> Frame:
        engine = self._engine
        step = max(0, min(message.priority, last))
        if step != message.priority:
            message = message._replace(priority=step)
        unique = f"{self._name}-{next(self._count)}"
        if message.delay > 0:
            engine.streams.ensure(engine.names.stream(queue), queue)
            first = int(engine.streams.now() * 1000)
            return delay_frame(engine, queue, step, message.delay, Envelope(message, first), unique)
        headers = {_MESSAGE_ID: unique}
        if message.expires is not None and engine.streams.known_level >= MESSAGE_TTL:
            # whole seconds, 1 at least: consumers look at the exact time
            headers["Nats-TTL"] = f"{max(1, int(message.expires) + 1)}s"
        return Frame(self.subject(queue, step, spec), Envelope(message).encode(), "", headers)

    def subject(self, queue: str, step: int, spec: QueueSpec | None) -> str:
        names = self._engine.names
        return names.ready(queue, step) if spec is None or spec.durable else names.brief(queue, step)

    # ------------------------------------------------------------------ confirmed later
    def _defer(self, queue: str, frames: Sequence[Frame]) -> list[str]:
        """Send; what was sent before is confirmed now."""
        with self._lock:
            self.flush()
            self._engine.link.open(self._engine.settings.publish_timeout)
            self._open = queue, frames, self._engine.plain.begin(frames, self._engine.settings.socket_timeout)
        return [(frame.headers or {}).get(_MESSAGE_ID, "") for frame in frames]

    def flush(self) -> None:
        """Wait for what is open; raises what went wrong with it."""
        with self._lock:
            if self._open is not None:
                (queue, frames, ticket), self._open = self._open, None
                replies = self._engine.plain.finish(ticket, self._engine.settings.socket_timeout)
                self.send(queue, frames, replies, ticket.began)

    # ------------------------------------------------------------------ sending
    def send(self, queue: str, frames: Sequence[Frame], answered: Sequence[Reply | None] | None = None,
             began: float = 0.0) -> list[str]:
        """Store all and return their sequences; `answered` are the replies to a first try, made at `began`. Raises
        StoreError at once, StoreConnectionError after `publish_timeout`, or when the server might no longer recognize a
        repetition."""
        settings, now = self._engine.settings, time.monotonic()
        end = min(now + settings.publish_timeout, (began or now) + settings.duplicate_window * FRESH)
        found: list[str] = [""] * len(frames)
        left: Sequence[int] = range(len(frames))
        problem: StoreConnectionError | None = None
        for tries in range(1_000_000):
            try:
                timeout = max(0.1, min(settings.socket_timeout, WAITS[tries % len(WAITS)],
                                       end - time.monotonic()))
                if answered is None:
                    answered = self._engine.plain.requests(
                        [frames[index] for index in left] if tries else frames, timeout)
                replies, answered = answered, None
            except AuthenticationError:
                raise
            except StoreConnectionError as error:
                replies, problem = [], error
            again = [] if replies else list(left)
            for index, reply in zip(left, replies, strict=False):
                try:
                    found[index] = self._sequence(queue, frames[index], reply)
                except StoreConnectionError as error:
                    again.append(index)
                    problem = error
            left = again
            if not left:
                return found
            pause = PAUSES[min(tries, len(PAUSES) - 1)]
            if time.monotonic() + pause >= end:
                break
            time.sleep(pause)
            self._remake(queue, frames[left[0]])
            if time.monotonic() >= end:
                break
        raise problem or StoreConnectionError("the store did not answer in time")

    def _remake(self, queue: str, frame: Frame) -> None:
        """The stream of a publish that nobody took may be gone. What fails here shows at the next try."""
        if not self._engine.link.connected:
            return
        stream = self._engine.stream_of(frame.subject, queue)
        self._engine.streams.forget(stream)
        try:
            self._engine.streams.ensure(stream, queue)
        except (StoreConnectionError, StoreError) as error:
            logger.debug("cannot make stream %s: %s", stream, error)

    def _sequence(self, queue: str, frame: Frame, reply: Reply | None) -> str:
        if reply is None and not self._engine.link.connected:
            raise self._engine.link.failure()
        if reply is None:
            raise StoreConnectionError("the store did not confirm a publish in time")
        if reply.status == 503:
            raise StoreUnavailable(NOBODY)
        found = _SEQUENCE.search(reply.data) if reply.data.startswith(b'{"stream"') else None
        if found:
            return found[1].decode()
        try:
            error = json.loads(reply.data)["error"]
            code, text = int(error.get("err_code", 0)), str(error.get("description", ""))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StoreError(f"unexpected answer to a publish to {queue!r}: {reply.data[:200]!r}") from None
        if code in NOT_NOW or "maximum" in text:
            raise StoreUnavailable(f"the store takes nothing for {queue!r} now: {text} (error {code})")
        raise ApiError(f"publish to {queue!r}", code, text)
