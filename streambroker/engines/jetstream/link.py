"""The way to the servers, for the rest of the engine: requests, listening and publishing from any thread, greenlet or
coroutine, over one connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from ... import fork
from ...errors import Closed, ConfigurationError, StoreConnectionError, StoreError
from ...settings import Settings
from .address import Address
from .answers import Ask, Batch
from .connection import OVERDUE, Connection
from .frames import Frame, Reply, encode, windows
from .session import Session
from .waiter import make_waiter

__all__ = ["Frame", "Link", "Listener", "Reply"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: what the parent of a fork left behind: collecting it would close what is not the child's
_graveyard: list[Connection] = []


class Listener:
    """A subscription. It comes back by itself after a reconnect."""

    def __init__(self, link: Link, connection: Connection, sid: int, subject: str) -> None:
        self._link = link
        self._connection = connection
        self._sid = sid
        self.subject = subject

    def close(self) -> None:
        """From any thread. Waits for nothing; nothing is handed over any more."""
        self._connection.forget(self._sid)

    async def drain(self) -> None:
        """In the loop's thread: returns when everything that the server had sent has been handed over."""
        await self._connection.drain(self._sid)

    def drain_now(self, timeout: float) -> None:
        """As `drain`, from other threads; gives up after `timeout` seconds."""
        try:
            self._link.run(self.drain, timeout)
        except (StoreConnectionError, Closed) as error:
            logger.debug("draining %s: %s", self.subject, error)
        self.close()


class Link:
    """Thread-safe and started by its first use. A forked child has one that knows nothing of its parent's."""

    def __init__(self, address: Address, settings: Settings) -> None:
        self.address = address
        self._settings = settings
        self._pid = os.getpid()
        self._connection = Connection(address, settings)
        fork.register(self)

    @property
    def epoch(self) -> int:
        """Grows with each connect; 0 before the first."""
        return self._connection.epoch

    @property
    def connected(self) -> bool:
        return self._connection.connected

    @property
    def max_payload(self) -> int:
        """Bytes of headers and data that the server takes in one message; 0 before the first connect."""
        return self._connection.max_payload

    @property
    def version(self) -> str:
        """The server's, such as 2.15.1; empty before the first connect."""
        return self._connection.version

    @property
    def proved(self) -> float:
        """time.monotonic() when the newest request was sent that was answered: what comes now left the server later,
        however long it lay in a buffer."""
        return self._connection.proved

    @property
    def session(self) -> Session | None:
        """The present connection, for looking: at its server, and how to log in there; None while there is none."""
        return self._connection.session

    @property
    def on_connect(self) -> list[Callable[[], None]]:
        """Called in the loop's thread after each connect, when the subscriptions are back."""
        return self._connection.on_connect

    @property
    def on_disconnect(self) -> list[Callable[[], None]]:
        """Called in the loop's thread when the connection is gone."""
        return self._connection.on_disconnect

    def new_inbox(self) -> str:
        """A subject that nobody else listens to."""
        return f"{self.address.inbox_prefix}.{secrets.token_hex(11)}"

    def failure(self) -> Exception:
        """Why there is no connection."""
        return self._connection.failure()

    # --- from any thread but the loop's

    def open(self, timeout: float, *, once: bool = False) -> None:
        """Connect. Raises StoreConnectionError after `timeout` seconds, with `once` also when no server took us, and
        goes on trying; AuthenticationError and ConfigurationError as soon as they are known."""
        connection = self._connection
        if connection.connected:
            return
        waiter = make_waiter()
        waiters = connection.triers if once else connection.openers
        waiters.add(waiter)
        try:
            connection.begin()
            if not connection.connected and not connection.refused:
                waiter.wait(timeout)
        finally:
            waiters.discard(waiter)
            waiter.done()
        if not connection.connected:
            raise connection.failure()

    def request(self, frame: Frame, timeout: float) -> Reply:
        """The answer; when nobody is there to give one, a Reply of status 503. Raises StoreConnectionError when none
        comes in time or the link breaks: whether the request was handled is not known then."""
        deadline = time.monotonic() + timeout
        self.open(timeout)
        reply = self._exchange([frame], deadline)[0]
        if reply is None:
            raise self._unanswered(frame)
        return reply

    def requests(self, frames: Sequence[Frame], timeout: float) -> list[Reply | None]:
        """The answers in the order of `frames`, which are in flight together; None where none came in time or the link
        broke. Raises AuthenticationError, ConfigurationError; MessageTooLarge, and then nothing was sent."""
        deadline = time.monotonic() + timeout
        try:
            self.open(timeout)
        except StoreConnectionError:
            if self._connection.refused:
                raise
            return [None] * len(frames)
        return self._exchange(frames, deadline)

    def listen(self, subject: str, handler: Callable[[Reply], None]) -> Listener:
        """Have `handler` called, in the loop's thread, with everything that comes on `subject`; it must neither block
        nor raise. Returns when the server knows of it. Raises StoreConnectionError, StoreError."""
        timeout = self._settings.socket_timeout
        self.open(timeout)
        return self.run(lambda: self.alisten(subject, handler), timeout + 1)

    def flush(self, timeout: float) -> None:
        """Return when the server has handled everything that was posted before. Raises StoreConnectionError."""
        self.run(partial(self.aprove, timeout), timeout + 0.5)

    def doubt(self) -> None:
        """The server answers nothing elsewhere: see whether it does here."""
        self._connection.doubt()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float) -> T:
        """The result of a coroutine that the loop's thread runs. Raises what it raises, and StoreConnectionError when
        it takes longer than `timeout` seconds: then it is cancelled."""
        thread = self._connection.begin()
        waiter = make_waiter()
        results: list[T] = []
        errors: list[Exception] = []
        tasks: list[asyncio.Task[None]] = []

        async def go() -> None:
            try:
                results.append(await work())
            except (StoreError, StoreConnectionError, ConfigurationError, Closed) as error:
                errors.append(error)
            finally:
                waiter.set()

        def start() -> None:
            tasks.append(thread.spawn(go()))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        over = False
        try:
            over = thread.call_soon(start) and waiter.wait(timeout)
        finally:
            if not over:
                thread.call_soon(cancel)
            waiter.done()
        if errors:
            raise errors[0]
        if not results:
            raise StoreConnectionError(f"{self.address} did not answer in time")
        return results[0]

    # --- from any thread, never blocks

    def post(self, frames: Iterable[Frame]) -> bool:
        """Publish, in order, without waiting for anything. False, and nothing is sent, while there is no connection.
        Raises MessageTooLarge."""
        connection = self._connection
        if not connection.connected:
            return False
        return connection.send(b"".join([encode(frame, connection.max_payload) for frame in frames]))

    def acknowledge(self, replies: Iterable[str], frames: Iterable[Frame] = ()) -> bool:
        """Tell the server that messages are done, by the subjects it gave with them, and publish `frames` behind; as
        `post`."""
        connection = self._connection
        if not connection.connected:
            return False
        return connection.send(b"".join([
            *(b"PUB %b 4\r\n+ACK\r\n" % reply.encode() for reply in replies),
            *(encode(frame, connection.max_payload) for frame in frames)]))

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Have the loop's thread, which is started when there is none, call it."""
        self._connection.begin().call_soon(callback)

    # --- in the loop's thread only

    async def ask(self, frame: Frame, timeout: float) -> Reply:
        """As `request`, but waits for no connection."""
        connection = self._connection
        future: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        token = connection.answers.add(Ask(future), 0, frame.subject)
        epoch, sent = connection.epoch, time.monotonic()
        try:
            if not connection.send(encode(frame, connection.max_payload, f"{connection.answers.inbox}.{token}")):
                raise connection.failure()
            reply = await asyncio.wait_for(future, timeout)
        except asyncio.TimeoutError:
            reply = None
            connection.doubt()
        finally:
            connection.answers.remove([token])
        if reply is None:
            raise self._unanswered(frame)
        if connection.epoch == epoch:
            connection.proved = max(connection.proved, sent)
        return reply

    async def asks(self, frames: Sequence[Frame], timeout: float) -> list[Reply | None]:
        """As `requests`, but waits for no connection: one wait for many answers, each `timeout` seconds at most."""
        connection = self._connection
        answers, limit = connection.answers, connection.max_payload
        replies: list[Reply | None] = []
        for window in windows(frames, limit):
            bell = asyncio.Event()
            batch = Batch(len(window), bell)
            tokens = [answers.add(batch, index, frame.subject) for index, frame in enumerate(window)]
            try:
                if connection.send(b"".join([encode(frame, limit, f"{answers.inbox}.{token}")
                                             for frame, token in zip(window, tokens, strict=True)])):
                    await asyncio.wait_for(bell.wait(), timeout)
            except asyncio.TimeoutError:
                connection.doubt()
            finally:
                answers.remove(tokens)
            replies += batch.replies
        return replies

    async def aprove(self, timeout: float) -> None:
        """Set `proved`; a connection that does not answer in time is ended. Raises StoreConnectionError."""
        session, sent = self._connection.session, time.monotonic()
        if session is None:
            raise self._connection.failure()
        await session.flush(timeout)
        if session is self._connection.session:
            self._connection.proved = max(self._connection.proved, sent)

    async def alisten(self, subject: str, handler: Callable[[Reply], None]) -> Listener:
        """As `listen`, but waits for no connection."""
        connection = self._connection
        return Listener(self, connection, await connection.subscribe(subject, handler), subject)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it; what it raises is logged."""
        self._connection.thread.spawn(coroutine)

    def call_next(self, callback: Callable[[], None]) -> None:
        """Call it when everything that was read with the present message is handled."""
        self._connection.call_next(callback)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._connection.thread.loop.call_later(seconds, callback)

    def close(self, timeout: float = 2.0) -> None:
        """Send what was posted and disconnect, within about `timeout` seconds. What waits for answers gets none. Later
        uses raise Closed."""
        self._connection.close(timeout)

    def after_fork(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            _graveyard.append(self._connection)
            self._connection = Connection(self.address, self._settings)

    def _exchange(self, frames: Sequence[Frame], deadline: float) -> list[Reply | None]:
        connection = self._connection
        answers, limit = connection.answers, connection.max_payload
        replies: list[Reply | None] = []
        for window in windows(frames, limit):
            if replies and time.monotonic() >= deadline:
                return replies + [None] * (len(frames) - len(replies))
            waiter = make_waiter()
            batch = Batch(len(window), waiter)
            tokens = [answers.add(batch, index, frame.subject) for index, frame in enumerate(window)]
            try:
                commands = [encode(frame, limit, f"{answers.inbox}.{token}")
                            for frame, token in zip(window, tokens, strict=True)]
                if connection.send(b"".join(commands)):
                    left = deadline - time.monotonic()
                    if not waiter.wait(min(left, OVERDUE)) and left > OVERDUE:
                        connection.doubt()
                        waiter.wait(deadline - time.monotonic())
            finally:
                answers.remove(tokens)
                waiter.done()
            replies += batch.replies
        return replies

    def _unanswered(self, frame: Frame) -> StoreConnectionError:
        return StoreConnectionError(f"{self.address} gave no answer on {frame.subject} in time, or the link broke")
