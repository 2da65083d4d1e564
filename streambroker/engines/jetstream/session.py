"""One connection, from login to its end. nats-py dials, negotiates TLS and logs in; then the connection is ours, which
costs a fraction of its reader, and lets other threads write by themselves.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.client import Client, RawCredentials

from ...errors import AuthenticationError, ConfigurationError, StoreConnectionError, StoreUnavailable
from ...real import make_reentrant_lock, original
from ...settings import Settings
from .address import Address, Server
from .loop import Loop
from .words import Deliver, Words

#: pause until the loop's thread tries again to write while another one does (seconds)
AGAIN = 0.001
#: so many times when a connection ends; then its socket is left to the collector
PATIENCE = 100
#: a dead connection is noticed after one to two of these
PING_INTERVAL = 10
_REFUSED = ("authorization violation", "authentication expired", "authentication revoked")
_FULL = ("maximum connections exceeded", "maximum account active connections exceeded", "server shutdown")


class _Client(Client):
    """Says what it was greeted with, and demands TLS where the address does."""

    def __init__(self, *, tls: bool) -> None:
        super().__init__()
        self._tls_wanted = tls
        self.info: dict[str, Any] = {}

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self._tls_wanted and not info.get("tls_required"):
            if not info.get("tls_available"):
                raise nats.errors.SecureConnWantedError
            # nats-py looks at this one alone: it would log in without TLS
            info["tls_required"] = True
        self.info.update(info)
        await super()._process_info(info, initial_connection)


class Session:
    """In the loop's thread only, but for `send_now`. Made by `open_session`; over when `ended` is."""

    def __init__(self, client: _Client, address: Address, server: Server, loop: Loop, deliver: Deliver,
                 tell: Callable[[Exception], None]) -> None:
        # keeps the transport from being collected, too
        self._client = client
        self._address = address
        self._loop = loop
        self._tell = tell
        self.server = server
        #: what the server told about itself, its latest word
        self.info = client.info
        self._pongs: deque[asyncio.Future[None] | None] = deque()
        self._words = Words(loop, deliver, self._hear)
        self._over = False
        #: held by who sends; reentrant for a signal's handler that sends in the midst of it
        self._lock = make_reentrant_lock()
        self._midway = False
        self._unsent: deque[bytes] = deque()
        self._transport: Any = client._transport._io_writer.transport  # type: ignore[union-attr]
        self._socket: Any = self._transport.get_extra_info("socket")
        #: a socket of our own for other threads to write to: the transport's number may be another file's when it ends
        self._direct: Any = None
        if self._transport.get_extra_info("sslcontext") is None:
            self._direct = original("socket", "socket")(fileno=os.dup(self._socket.fileno()))
            # whatever `setdefaulttimeout` says
            self._direct.setblocking(False)

    async def take_over(self) -> None:
        """The connection is ours from now on, with what nats-py has read of it already."""
        client = self._client
        tasks = [task for task in (client._reading_task, client._ping_interval_task, client._flusher_task)
                 if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        reader: Any = client._transport._io_reader  # type: ignore[union-attr]
        early = bytes(client._ps.buf) + bytes(reader._buffer)
        self._transport.set_protocol(self._words)
        if self._direct is not None:
            # so that `full` tells of every byte that waits
            self._transport.set_write_buffer_limits(high=0)
        if reader.at_eof() or self._transport.is_closing():
            self._words.connection_lost(None)
            return
        # the reader may have been full
        self._transport.resume_reading()
        if early:
            self._words.data_received(early)
        self._loop.call_later(PING_INTERVAL, self._look, self._words.heard, False)

    @property
    def ended(self) -> asyncio.Future[None]:
        """Ends with the connection, whatever ends it."""
        return self._words.ended

    @property
    def alive(self) -> bool:
        return not self.ended.done()

    def call_next(self, callback: Callable[[], None]) -> None:
        """Call it when everything that was read with the present message is handled."""
        self._words.call_next(callback)

    # ------------------------------------------------------------------ saying
    def write(self, data: bytes) -> None:
        self._unsent.append(data)
        self._write_unsent()

    def _write_unsent(self) -> None:
        """Without waiting for the lock: a signal's handler that interrupts a sender may wait for this thread."""
        if not self._lock.acquire(blocking=False):
            self._loop.call_later(AGAIN, self._write_unsent)
            return
        try:
            if self._midway:
                self._tell(StoreConnectionError("a sender was interrupted"))
                self._drop()
                return
            while self._unsent:
                self._transport.write(self._unsent.popleft())
        finally:
            self._lock.release()

    def send_now(self, data: bytes) -> bool:
        """From any thread, without waking the loop's. False, and nothing is sent, when something has to be sent before,
        or there is no way past the loop (TLS)."""
        # one who is interrupted by a handler that sends, too; the name tells mypy that it is no longer so below
        busy = self._midway
        if busy:
            return False
        # only this statement lets go of the lock wherever an exception comes
        with self._lock:
            if self._midway:
                return False
            # a time limit may end this at any place: the rest of a command must not be lost
            self._midway = True
            direct = self._direct
            if direct is None or self._unsent or self._words.full:
                self._midway = False
                return False
            try:
                sent = direct.send(data)
            except OSError:
                # full, or broken: the loop will tell
                self._midway = False
                return False
            if sent < len(data):
                # the loop may have put something there meanwhile
                self._unsent.appendleft(data[sent:])
            self._midway = False
        if self._unsent:
            try:
                self._loop.call_soon_threadsafe(self._write_unsent)
            except RuntimeError:
                return False  # the loop ended meanwhile
        return True

    async def flush(self, timeout: float) -> None:
        """Return when the server has handled everything written before, and everything it sent before was handed over.
        Raises StoreConnectionError; a connection that does not answer in time is ended."""
        if not self.alive:
            raise StoreConnectionError(f"the connection to {self.server} broke")
        pong: asyncio.Future[None] = self._loop.create_future()
        self._ping(pong)
        done, _ = await asyncio.wait([pong, self.ended], timeout=max(timeout, 0.001),
                                     return_when=asyncio.FIRST_COMPLETED)
        if not done:
            self._drop()
            raise StoreConnectionError(f"{self.server}: no answer in time")
        if not pong.done():
            raise StoreConnectionError(f"the connection to {self.server} broke")

    def _ping(self, pong: asyncio.Future[None] | None) -> None:
        self._pongs.append(pong)
        self.write(b"PING\r\n")

    def _look(self, heard: float, asked: bool) -> None:
        """A connection that has nothing to say for an interval is asked, one that does not answer is dead."""
        if not self.alive:
            return
        if self._words.heard > heard:
            heard, asked = self._words.heard, False
        elif asked:
            self._tell(StoreConnectionError(f"{self.server} answers no more"))
            self._drop()
            return
        else:
            self._ping(None)
            asked = True
        self._loop.call_later(PING_INTERVAL, self._look, heard, asked)

    # ------------------------------------------------------------------ hearing
    def _hear(self, operation: bytes, rest: bytes) -> None:
        """What is no message."""
        if operation == b"PING":
            self.write(b"PONG\r\n")
        elif operation == b"PONG":
            pong = self._pongs.popleft() if self._pongs else None
            if pong is not None and not pong.done():
                pong.set_result(None)
        elif operation == b"INFO":
            self.info.update(json.loads(rest))
        elif operation == b"-ERR" and not self._over:
            self._tell(nats.errors.Error(f"nats: {rest.decode(errors='replace')}"))

    def discovered(self) -> list[Server]:
        """Servers of the cluster, as this one tells."""
        servers = []
        for place in self.info.get("connect_urls") or ():
            host, _, port = place.rpartition(":")
            name = self.server.tls_name or self.server.host
            servers.append(Server(host.strip("[]"), int(port), name))
        return servers

    def connect_command(self, info: dict[str, Any]) -> bytes:
        """The command that logs another connection in, one that was greeted with `info`."""
        other = copy.copy(self._client)
        other._server_info = info
        # the login may have changed since
        other.options = {**other.options, **{name: value for name, value in self._address.login().items()
                                             if name in ("user", "password", "token")}}
        return bytes(other._connect_command())

    async def close(self, timeout: float) -> None:
        """End it; waits at most that long for what was written to go out."""
        self._over = True
        self._transport.close()
        if timeout > 0:
            await asyncio.wait([self.ended], timeout=timeout)
        self._drop()
        await self._close_direct()

    async def _close_direct(self) -> None:
        direct = self._direct
        if direct is None:
            return
        try:
            # the transport's own end may have come before
            direct.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is broken
        for _ in range(PATIENCE):
            # not while someone writes to it: its number could be another file's at that moment
            if self._lock.acquire(blocking=False):
                try:
                    self._direct = None
                    direct.close()
                finally:
                    self._lock.release()
                return
            await asyncio.sleep(AGAIN)

    def _drop(self) -> None:
        try:
            # forked children may have it, too: closing alone would not end it
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed
        _drop(self._client, self._loop)


def _drop(client: Client, loop: Loop) -> None:
    """Whatever state it is in, its socket is closed now."""
    if client._transport:
        # asyncio of Python 3.10 counts a TLS transport that was only aborted as never closed
        client._transport.close()  # type: ignore[no-untyped-call]
    loop.cut()


async def open_session(address: Address, server: Server, settings: Settings, loop: Loop, deliver: Deliver,
                       tell: Callable[[Exception], None]) -> Session:
    """Connect to one server and log in. `tell` gets what the server complains about later. Raises StoreConnectionError,
    AuthenticationError, ConfigurationError."""
    login = address.login()
    if "user_credentials" in login:
        login["user_credentials"] = RawCredentials(login["user_credentials"])
    context = address.context()
    client = _Client(tls=address.tls and not address.handshake_first)

    troubles: list[Exception] = []

    async def on_error(error: Exception) -> None:
        troubles.append(error)

    options: dict[str, Any] = {"connect_timeout": settings.socket_connect_timeout}
    if server.tls_name:
        options["tls_hostname"] = server.tls_name
    if context is not None:
        options["tls"] = context
    if address.handshake_first:
        options["tls_handshake_first"] = True
    try:
        await client.connect(
            servers=[f"nats://{server}"], error_cb=on_error, name=settings.client_name or "streambroker",
            allow_reconnect=False, max_reconnect_attempts=1, reconnect_time_wait=0, dont_randomize=True,
            inbox_prefix=address.inbox_prefix, **login, **options)
        if not client.is_connected:
            raise StoreConnectionError(f"{server} closed the connection during the login")
    except ModuleNotFoundError as error:
        raise ConfigurationError("nkeys and credentials files need the package nkeys: pip install "
                                 "'streambroker[jetstream]'") from error
    except (OSError, nats.errors.Error, asyncio.TimeoutError) as error:
        _drop(client, loop)
        # after a refused connection nats-py itself says no more than that there is no further server
        raise translate(troubles[-1] if troubles else error, server) from error
    except BaseException as error:
        _drop(client, loop)
        if isinstance(error, Exception) and ("nkeys_seed_str" in login or "user_credentials" in login):
            # whatever the key's package raises; its text could show the key
            raise ConfigurationError(f"the key or the credentials are none: {type(error).__name__}") from None
        raise
    session = Session(client, address, server, loop, deliver, tell)
    await session.take_over()
    return session


def translate(error: BaseException, server: Server | None = None) -> StoreConnectionError:
    """nats-py's and the system's errors as ours."""
    if isinstance(error, StoreConnectionError):
        return error
    at = f"{server}: " if server else ""
    text = str(error).removeprefix("nats: ").strip("'")
    lower = text.lower()
    if isinstance(error, nats.errors.SecureConnWantedError):
        return StoreConnectionError(f"{at}the server has no TLS, and the address demands it; nothing was sent")
    if isinstance(error, nats.errors.AuthorizationError) or any(word in lower for word in _REFUSED):
        return AuthenticationError(f"{at}the server refused the login ({text}); look at user, password, token, key or "
                                   "credentials file")
    if any(word in lower for word in _FULL):
        return StoreUnavailable(f"{at}{text}")
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return StoreConnectionError(f"{at}no answer in time")
    return StoreConnectionError(f"{at}{text or type(error).__name__}")
