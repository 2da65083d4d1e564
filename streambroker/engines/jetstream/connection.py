"""Keeping one connection up for the life of a process: connecting, connecting again, subscriptions that come back, and
what is written. Most of it runs in the loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ...errors import AuthenticationError, Closed, ConfigurationError, StoreConnectionError, StoreError
from ...real import make_lock
from ...settings import Settings
from .address import Address
from .answers import Answers
from .frames import Reply, read_reply
from .loop import LoopThread, Wake
from .notices import Notices
from .session import Session, open_session
from .waiter import Waiter

logger = logging.getLogger(__name__)

#: between tries (seconds); a connection that ends within _BRIEF was no better than none
_FIRST_PAUSE, _LONGEST_PAUSE, _BRIEF = 0.1, 1.0, 0.25
#: after so long an answer is overdue, and how long the answer to a ping may then take (seconds)
OVERDUE, PONG = 1.0, 1.5
_INBOX = 0
_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')


class Subscribed(NamedTuple):
    subject: str
    handler: Callable[[Reply], None]


class Connection:
    """State of one process. Coroutines are for the loop's thread."""

    def __init__(self, address: Address, settings: Settings) -> None:
        self.address = address
        self._settings = settings
        self._lock = make_lock()
        self._thread: LoopThread | None = None
        self._session: Session | None = None
        self._supervised = False
        self.closed = False
        self._failure: Exception | None = None
        self._subscribed: dict[int, Subscribed] = {}
        self._sids = itertools.count(_INBOX + 1)
        self.answers = Answers(f"{address.inbox_prefix}.{secrets.token_hex(11)}")
        #: (epoch, commands): what was meant for one connection never goes to a later one
        self._outgoing: deque[tuple[int, bytes]] = deque()
        self._woken, self._doubted = Wake(), Wake()
        self._notices = Notices()
        #: who waits for a connection, and who waits until each server was tried
        self.openers: set[Waiter] = set()
        self.triers: set[Waiter] = set()
        self._denied: set[str] = set()
        self._servers = list(address.servers)
        self.epoch = 0
        self.connected = False
        #: when the newest request was sent that was answered (time.monotonic())
        self.proved = float("-inf")
        self.max_payload = 0
        self.version = ""
        self.on_connect: list[Callable[[], None]] = []
        self.on_disconnect: list[Callable[[], None]] = []

    def begin(self) -> LoopThread:
        """Start the thread and connecting, when they do not run. Raises Closed."""
        with self._lock:
            if self.closed:
                raise Closed(f"the link to {self.address} is closed")
            thread = self._thread
            if thread is None:
                thread = self._thread = LoopThread(keepalive=self._settings.socket_keepalive)
            if not self._supervised:
                self._supervised = True
                self._failure = None
                thread.call_soon(lambda: thread.spawn(self._supervise()))
        return thread

    @property
    def thread(self) -> LoopThread:
        """For what runs in it."""
        if self._thread is None:
            raise Closed(f"the link to {self.address} was not opened in this process")
        return self._thread

    def close(self, timeout: float) -> None:
        """Send what is queued and disconnect, within about `timeout` seconds; for good. From any thread."""
        with self._lock:
            thread, was_closed = self._thread, self.closed
            self.closed = True
        if thread is None or was_closed:
            return
        self._wake_openers()
        deadline = time.monotonic() + timeout + 0.5
        thread.call_soon(lambda: thread.spawn(self._finish(thread, timeout)))
        while not thread.ended and not thread.is_current and time.monotonic() < deadline:
            time.sleep(0.002)
        if not thread.ended:
            thread.stop()

    @property
    def session(self) -> Session | None:
        """The present one; to be used in the loop's thread, or for looking."""
        return self._session if self.connected else None

    def failure(self) -> Exception:
        """Why there is no connection, as an error to raise."""
        reason = self._failure
        if self.closed:
            return Closed(f"the link to {self.address} is closed")
        if isinstance(reason, (AuthenticationError, ConfigurationError)):
            return type(reason)(str(reason))
        text = str(reason or "no answer in time").removeprefix("nats: ")
        return StoreConnectionError(f"no connection to {self.address}: {text}")

    @property
    def refused(self) -> bool:
        """The last attempt failed for a reason that waiting does not mend."""
        return isinstance(self._failure, (AuthenticationError, ConfigurationError))

    def send(self, data: bytes) -> bool:
        """Send commands, at once where that can be: waking the loop's thread costs more. False, and nothing is sent,
        while not connected."""
        epoch, thread, session = self.epoch, self._thread, self._session
        if not self.connected or self.epoch != epoch or thread is None or session is None:
            return False
        if not self._outgoing and not thread.is_current and session.send_now(data):
            return True
        self._outgoing.append((epoch, data))
        return self._woken.ask(lambda: thread.call_soon(self._write_out))

    def doubt(self) -> None:
        """An answer is overdue: a connection that answers no ping either is ended. From any thread."""
        thread = self._thread
        if thread is not None:
            self._doubted.ask(lambda: thread.call_soon(lambda: thread.spawn(self._ping())))

    def forget(self, sid: int) -> None:
        """Hand nothing more over for that subscription."""
        if self._subscribed.pop(sid, None) is not None:
            self.send(b"UNSUB %d\r\n" % sid)

    # --- in the loop's thread

    def call_next(self, callback: Callable[[], None]) -> None:
        """Call it when everything that was read with the present message is handled."""
        call = self.thread.loop.call_soon if self._session is None else self._session.call_next
        call(callback)

    async def subscribe(self, subject: str, handler: Callable[[Reply], None]) -> int:
        """Its number, when the server knows of it. Raises StoreConnectionError, StoreError."""
        session = self.session
        if session is None:
            raise self.failure()
        sid = next(self._sids)
        self._subscribed[sid] = Subscribed(subject, handler)
        self._denied.discard(subject.lower())
        try:
            self._write_out()
            session.write(_subscribe(sid, subject))
            await session.flush(self._settings.socket_timeout)
            if subject.lower() in self._denied:
                raise StoreError(f"the user may not subscribe to {subject}: the server's permissions must allow it")
        except BaseException:
            self.forget(sid)
            raise
        return sid

    async def drain(self, sid: int) -> None:
        """End a subscription; what the server had sent for it is handed over first."""
        session = self.session
        if session is not None and sid in self._subscribed:
            self._write_out()
            session.write(b"UNSUB %d\r\n" % sid)
            try:
                await session.flush(self._settings.socket_timeout)
            except StoreConnectionError as error:
                logger.debug("ending a subscription: %s", error)
        self._subscribed.pop(sid, None)

    async def _ping(self) -> None:
        session = self.session
        try:
            if session is not None:
                await session.flush(PONG)
        except StoreConnectionError as error:
            logger.debug("%s: %s", self.address, error)
        finally:
            self._doubted.on = False

    async def _finish(self, thread: LoopThread, timeout: float) -> None:
        session = self.session
        if session is not None:
            self._write_out()
            try:
                await session.flush(timeout)
            except StoreConnectionError as error:
                logger.debug("closing: %s", error)
            await session.close(0.2)
        thread.stop()

    def _write_out(self) -> None:
        self._woken.on = False
        outgoing = list(self._outgoing)
        parts = [data for epoch, data in outgoing if epoch == self.epoch and self.connected]
        if parts and self._session is not None:
            self._session.write(parts[0] if len(parts) == 1 else b"".join(parts))
        # only now: what comes later must not go before
        for _ in outgoing:
            self._outgoing.popleft()

    def _deliver(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        message = read_reply(subject, reply, data, headers)
        if sid == _INBOX:
            self.answers.take(message)
            return
        subscribed = self._subscribed.get(sid)
        if subscribed is not None:
            try:
                subscribed.handler(message)
            except Exception:
                logger.exception("the handler of %s failed", subscribed.subject)

    def _complain(self, error: Exception) -> None:
        """The server, or nats-py, says something is wrong."""
        text = str(error).removeprefix("nats: ")
        found = _DENIED.search(text.lower())
        if found is None:
            self._failure = error
            logger.debug("%s: %s", self.address, text)
            return
        what, subject = found.groups()
        if what == "publish" and subject not in self._denied:
            logger.warning("%s: the user lacks a permission: %s", self.address, text)
        self._denied.add(subject)
        if what == "publish":
            self.answers.refuse(subject, text)

    async def _supervise(self) -> None:
        """Connect, and again whenever the connection ends. Gives up only when the first login is refused."""
        pause = _FIRST_PAUSE
        try:
            while not self.closed:
                session = await self._connect()
                since = time.monotonic()
                if session is not None:
                    await asyncio.wait([session.ended])
                    await self._lost(session)
                    if time.monotonic() - since > _BRIEF:
                        pause = _FIRST_PAUSE
                        continue
                elif self.refused and not self.epoch:
                    return
                else:
                    self._notices.away()
                    for waiter in set(self.triers):
                        waiter.set()
                await asyncio.sleep(pause * random.uniform(0.7, 1.0))
                pause = min(pause * 2, _LONGEST_PAUSE)
        finally:
            self._supervised = False
            self._wake_openers()

    async def _connect(self) -> Session | None:
        """To the first server that takes us, in random order but for the first time; None when none does."""
        servers = list(self._servers)
        if self.epoch:
            random.shuffle(servers)
        for server in servers:
            session = None
            try:
                thread = self._thread
                assert thread is not None
                session = await open_session(self.address, server, self._settings, thread.loop, self._deliver,
                                             self._complain)
                await self._set_up(session)
            except Exception as error:
                if not isinstance(error, (StoreConnectionError, ConfigurationError)):
                    logger.exception("connecting to %s failed", server)
                if session is not None:
                    await session.close(0)
                self._failure = error
                if self.refused:
                    self._wake_openers()
                    return None
            else:
                return session
        return None

    async def _set_up(self, session: Session) -> None:
        inbox = f"{self.answers.inbox}.*"
        self._denied.clear()
        subscriptions = [_subscribe(_INBOX, inbox)]
        subscriptions += [_subscribe(sid, each.subject) for sid, each in list(self._subscribed.items())]
        session.write(b"".join(subscriptions))
        proved = time.monotonic()
        await session.flush(self._settings.socket_connect_timeout)
        if inbox.lower() in self._denied:
            raise AuthenticationError(f"the user may not subscribe to {self.address.inbox_prefix}.>: the server's "
                                      "permissions must allow it, or the option inbox_prefix name what they allow")
        for server in session.discovered():
            if all((server.host, server.port) != (known.host, known.port) for known in self._servers):
                self._servers.append(server)
        self._session = session
        self.max_payload = int(session.info.get("max_payload") or 1048576)
        self.version = str(session.info.get("version") or "")
        self.epoch += 1
        self.proved = proved
        self.connected = True
        self._failure = None
        self._notices.connected(f"connected to {session.server}", again=self.epoch > 1)
        self._call(self.on_connect)
        self._wake_openers()

    async def _lost(self, session: Session) -> None:
        self.connected = False
        if not self.closed:
            self._notices.lost(f"lost the connection to {session.server}: {self._failure or 'it was closed'}")
        self.answers.fail()
        self._call(self.on_disconnect)
        await session.close(0)
        self._session = None

    def _call(self, callbacks: list[Callable[[], None]]) -> None:
        for callback in list(callbacks):
            try:
                callback()
            except Exception:
                logger.exception("a callback of the link to %s failed", self.address)

    def _wake_openers(self) -> None:
        for waiter in {*self.openers, *self.triers}:
            waiter.set()


def _subscribe(sid: int, subject: str) -> bytes:
    return f"SUB {subject} {sid}\r\n".encode()
