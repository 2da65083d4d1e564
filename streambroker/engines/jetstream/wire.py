"""A plain connection: a blocking socket beside nats-py's own connection, to the server that this is on, logged in with
its words. Whoever uses it sends and receives by himself, so no other thread has to be woken: that is half the time of a
publish.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import time
from typing import Any

from ...errors import StoreConnectionError
from ...settings import Settings
from ...sockets import bound_waits
from .address import Address
from .frames import Reply, read_reply
from .session import Session

_DENIED = re.compile(r'permissions violation for publish to "([^"]*)"', re.IGNORECASE)

#: the longest wait of one `receive`: so long others may have to wait for their turn
SLICE = 0.01
_NOT_NOW = (TimeoutError, BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Wire:
    """One user at a time. After any error it is closed, by its user. `heard` is the monotonic time of the last word."""

    def __init__(self, sock: socket.socket, inbox: str) -> None:
        self._sock = sock
        self._by_kernel = bound_waits(sock, SLICE)
        self._inbox = f"{inbox}.".encode()
        self._rest = b""
        self._greeted = False
        self.heard = time.monotonic()

    def send(self, data: bytes, timeout: float) -> None:
        """All of it. Raises OSError."""
        try:
            sent = self._sock.send(data)
        except _NOT_NOW:
            sent = 0
        if sent == len(data):
            return
        end = time.monotonic() + timeout
        left = memoryview(data)[sent:]
        while left:
            try:
                left = left[self._sock.send(left):]
            except _NOT_NOW:
                if time.monotonic() > end:
                    raise

    def receive(self) -> list[tuple[int, Reply]]:
        """Answers, each with the number of its request; none when nothing comes within SLICE. A 403 is for all requests
        to the Reply's subject, and has number 0. Raises OSError, StoreConnectionError."""
        try:
            data = self._sock.recv(65536)
        except _NOT_NOW:
            return []
        return self._took(data)

    def look(self) -> list[tuple[int, Reply]]:
        """As `receive`, without waiting."""
        if not self._by_kernel:
            self._sock.settimeout(0)
            try:
                return self.receive()
            finally:
                self._sock.settimeout(SLICE)
        try:
            data = self._sock.recv(65536, socket.MSG_DONTWAIT)
        except _NOT_NOW:
            return []
        return self._took(data)

    def close(self) -> None:
        self._sock.close()

    def _took(self, data: bytes) -> list[tuple[int, Reply]]:
        if not data:
            raise StoreConnectionError("the server closed the connection")
        self.heard = time.monotonic()
        return self._read(data)

    def _read(self, data: bytes) -> list[tuple[int, Reply]]:
        if self._rest:
            data = self._rest + data
        answers: list[tuple[int, Reply]] = []
        start = 0
        while (end := data.find(b"\r\n", start)) >= 0:
            line = data[start:end]
            next_line = end + 2
            word = line[:4].upper()
            if word in (b"MSG ", b"HMSG"):
                words = line.split()
                size = int(words[-1])
                if len(data) < next_line + size + 2:
                    break
                head = int(words[-2]) if word == b"HMSG" else 0
                body = data[next_line + head:next_line + size]
                if words[1].startswith(self._inbox):
                    # nobody looks at the subject of an answer
                    answers.append((int(words[1][len(self._inbox):]), Reply("", body) if not head else
                                    read_reply(b"", b"", body, data[next_line:next_line + head])))
                next_line += size + 2
            elif word == b"PING":
                self._sock.sendall(b"PONG\r\n")
            elif word == b"-ERR":
                denied = _DENIED.search(line.decode(errors="replace"))
                if denied is None:
                    raise StoreConnectionError(line[4:].decode(errors="replace").strip(" '"))
                answers.append((0, Reply(denied[1], b"", "", 403, {"Description": denied[0]})))
            elif word == b"PONG":
                self._greeted = True
            start = next_line
        self._rest = data[start:]
        return answers

    def greet(self, words: bytes, timeout: float) -> None:
        """Send the login; return when the server took it. Raises OSError, StoreConnectionError."""
        end = time.monotonic() + timeout
        self.send(words + b"SUB " + self._inbox + b"* 1\r\nPING\r\n", timeout)
        while not self._greeted:
            if time.monotonic() > end:
                raise StoreConnectionError("no answer to the login in time")
            if self.receive():
                raise StoreConnectionError("the login was answered by a refusal")


def dial(session: Session, address: Address, settings: Settings, inbox: str, timeout: float) -> Wire:
    """A connection to the server of `session` that hears what is sent to `inbox`.<number>, each step within `timeout`
    seconds and the set limit. Raises OSError, StoreConnectionError, ConfigurationError."""
    timeout = min(settings.socket_connect_timeout, max(timeout, SLICE))
    server = session.server
    sock: Any = socket.create_connection((server.host, server.port), timeout)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if settings.socket_keepalive:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if address.handshake_first:
            sock = _wrap(sock, session, address)
        info = _read_info(sock)
        if not address.handshake_first and (address.tls or info.get("tls_required")):
            if not (info.get("tls_required") or info.get("tls_available")):
                raise StoreConnectionError("the server has no TLS, and the address demands it")
            sock = _wrap(sock, session, address)
        wire = Wire(sock, inbox)
        wire.greet(session.connect_command(info), timeout)
    except BaseException:
        sock.close()
        raise
    return wire


def _wrap(sock: socket.socket, session: Session, address: Address) -> ssl.SSLSocket:
    context = address.context() or ssl.create_default_context()
    return context.wrap_socket(sock, server_hostname=session.server.tls_name or session.server.host)


def _read_info(sock: Any) -> dict[str, Any]:
    """The server's first line; after it the server waits for us, so nothing of the next one is read with it."""
    line = b""
    while not line.endswith(b"\r\n"):
        data = sock.recv(65536)
        if not data:
            raise StoreConnectionError("the server closed the connection")
        line += data
    word, _, text = line.partition(b" ")
    if word.upper() != b"INFO":
        raise StoreConnectionError("no nats-server answers there")
    info: dict[str, Any] = json.loads(text)
    return info
