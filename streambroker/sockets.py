"""Sockets whose waits the kernel bounds."""

from __future__ import annotations

import socket
import ssl
import struct
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
