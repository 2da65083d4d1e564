"""Sockets whose waits the kernel bounds."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from typing import Any

from .real import is_green


def bound_waits(sock: Any, seconds: float) -> bool:
    """Let each receiving and sending wait so long at most: it raises TimeoutError or BlockingIOError then. Whether the
    kernel does the waiting: before each call on a socket with a time-out of its own Python asks `poll`, one system call
    more. Then `recv(size, MSG_DONTWAIT)` never waits; where it cannot be (TLS, greenlets) `settimeout(0)` is for
    that."""
    if is_green() or isinstance(sock, ssl.SSLSocket):
        sock.settimeout(seconds)
        return False
    whole = int(seconds)
    wait = struct.pack("ll", whole, max(int((seconds - whole) * 1e6), 0 if whole else 1))
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
    return True


def send_all(sock: Any, data: bytes, seconds: float) -> None:
    """All of it, in about `seconds` at most, over a socket whose waits the kernel bounds by as much. `sendall` would
    wait so long again after each part. Raises OSError."""
    # the kernel may wake a moment early
    end = time.monotonic() + 0.9 * seconds
    sent = sock.send(data)
    if sent < len(data):
        left = memoryview(data)[sent:]
        while left:
            if time.monotonic() > end:
                raise TimeoutError("not all was taken in time")
            left = left[sock.send(left):]
