"""One connection, driven by hand: redis-py dials (address, TLS, credentials, database), then bytes go straight to the
socket and replies come through our reader. That is half the cost of a command, and lets replies be read later.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

import redis
import redis.exceptions

from ...errors import AuthenticationError, StoreConnectionError, StoreError, StoreUnavailable
from ...readable import wait_readable
from ...sockets import bound_waits, send_all
from .resp import ReplyError, make_reader, pack

Dial = Callable[[float], redis.Connection]

#: first words of answers that mean: not now, perhaps soon
UNAVAILABLE = frozenset({"LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "OOM", "MISCONF", "BUSY",
                         "NOREPLICAS", "UNBLOCKED", "MOVED", "ASK"})
#: answers of a server that is no longer the right one: dial again
DEMOTED = frozenset({"READONLY", "MASTERDOWN", "MOVED", "ASK", "CLUSTERDOWN"})
_AUTH = frozenset({"NOAUTH", "WRONGPASS"})


def translate(error: ReplyError) -> StoreError | StoreConnectionError:
    """A server's refusal as one of our errors."""
    text = str(error)
    word = text.split(" ", 1)[0]
    if word in UNAVAILABLE:
        return StoreUnavailable(text)
    if word in _AUTH:
        return AuthenticationError(text)
    if word == "WRONGTYPE":
        return StoreError("a key of ours holds another type: some other program wrote to it; delete or rename that "
                          f"key, or use another prefix ({text})")
    if word == "NOPERM" or "ACL failure in script" in text:
        return StoreError(f"the user lacks a permission: {text}")
    return StoreError(text)


def is_about_certificates(error: BaseException | None) -> bool:
    """Whether one side refused the other's certificate; who connects wraps it."""
    while error is not None:
        if isinstance(error, ssl.SSLError) and re.search("CERTIFICATE|UNKNOWN_CA", error.reason or ""):
            return True
        error = error.__cause__ or error.__context__
    return False


class Link:
    """Not thread-safe: its owner holds a lock or is the only user. After any StoreConnectionError it is closed."""

    def __init__(self, dial: Dial, timeout: float) -> None:
        self._dial = dial
        self._timeout = timeout
        self._connection: redis.Connection | None = None
        self._sock: Any = None
        self._by_kernel = False
        self._reader = make_reader()
        self.opened = 0.0

    @property
    def is_open(self) -> bool:
        return self._sock is not None

    def open(self, timeout: float | None = None) -> None:
        """Connect, with at most `timeout` seconds for each step. Raises StoreConnectionError, AuthenticationError."""
        connection: redis.Connection | None = None
        try:
            connection = self._dial(self._timeout if timeout is None else min(timeout, self._timeout))
            connection.connect()  # type: ignore[no-untyped-call]
        except StoreConnectionError:
            raise
        except redis.exceptions.AuthenticationError as error:
            raise AuthenticationError(str(error)) from error
        except redis.exceptions.BusyLoadingError as error:
            raise StoreUnavailable(str(error)) from error
        except (redis.exceptions.RedisError, OSError) as error:
            if connection is not None:
                connection.disconnect()  # type: ignore[no-untyped-call]
            if is_about_certificates(error):
                raise AuthenticationError(f"no encrypted link, see the options ssl_*: {error}") from error
            if "DB index is out of range" in str(error):
                raise StoreUnavailable("the server has no database of that number; its setting databases says how "
                                       "many it has") from error
            raise StoreConnectionError(str(error) or type(error).__name__) from error
        self._connection = connection
        self._sock = connection._sock
        self._reader = make_reader()
        self._by_kernel = bound_waits(self._sock, self._timeout)
        self.opened = time.monotonic()

    def fileno(self) -> int:
        return int(self._sock.fileno()) if self._sock is not None else -1

    def close(self) -> None:
        connection, self._connection, self._sock = self._connection, None, None
        if connection is not None:
            connection.disconnect()  # type: ignore[no-untyped-call]

    def interrupt(self) -> None:
        """End a read that waits in another thread."""
        sock = self._sock
        try:
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed meanwhile

    def abandon(self) -> None:
        """Forget the socket without a word on it: for the child of a fork."""
        self._connection = self._sock = None

    def send(self, data: bytes) -> None:
        if self._sock is None:
            raise StoreConnectionError("not connected")
        try:
            if self._by_kernel:
                send_all(self._sock, data, self._timeout)
            else:
                self._sock.sendall(data)
        except (OSError, ValueError) as error:
            self.close()
            raise StoreConnectionError(f"link broke while sending: {error}") from error
        except BaseException:
            # a time limit, say: what comes next would be read as the rest of this command
            self.close()
            raise

    def poll(self) -> list[Any]:
        """Replies that have arrived; never waits."""
        replies: list[Any] = []
        while True:
            data = self._receive(0.0)
            if data is None:
                return replies
            self._reader.feed(data)
            while (reply := self._next()) is not False:
                replies.append(reply)
            if len(data) < 65536 and not self._buffered():
                return replies

    def read(self, timeout: float | None = None, *, waits_on: bool = False) -> Any:
        """The next reply; ReplyError is returned, not raised. Raises StoreConnectionError, also on a time-out: the
        answer could come later and be taken for another one's. Who `waits_on` gets False then, and reads again."""
        if timeout is None:
            timeout = self._timeout
        deadline = None
        while (reply := self._next()) is False:
            if deadline is None:
                deadline, left = time.monotonic() + timeout, timeout
            else:
                left = deadline - time.monotonic()
            data = self._receive(left) if left > 0 else None
            if data is None:
                if waits_on:
                    return False
                self.close()
                raise StoreConnectionError("no answer in time")
            self._reader.feed(data)
        return reply

    def call(self, *words: bytes | str | int | float, timeout: float | None = None) -> Any:
        """One command, one reply. Raises StoreError or StoreConnectionError for an error reply."""
        self.send(pack(*words))
        reply = self.read(timeout)
        if isinstance(reply, ReplyError):
            raise translate(reply) from reply
        return reply

    def _next(self) -> Any:
        try:
            return self._reader.gets()
        except Exception as error:
            # no RESP: something else answers, or bytes went missing
            self.close()
            raise StoreConnectionError(f"an answer cannot be read: {error}") from error

    def _buffered(self) -> bool:
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    def _receive(self, timeout: float) -> bytes | None:
        sock = self._sock
        if sock is None:
            raise StoreConnectionError("not connected")
        try:
            if timeout == self._timeout:
                data: bytes = sock.recv(65536)
            elif self._by_kernel:
                if timeout > 0 and not wait_readable([sock.fileno()], timeout):
                    return None
                data = sock.recv(65536, socket.MSG_DONTWAIT)
            else:
                sock.settimeout(timeout)
                try:
                    data = sock.recv(65536)
                finally:
                    sock.settimeout(self._timeout)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return None
        except (OSError, ValueError) as error:
            self.close()
            raise StoreConnectionError(f"link broke while reading: {error}") from error
        if not data:
            self.close()
            raise StoreConnectionError("the server closed the connection")
        return data
