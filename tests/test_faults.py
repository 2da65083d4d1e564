"""The fault proxy against a small echo server: each fault is what it says."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from streambroker.testing.faults import Proxy


class Echo:
    """Answers each line with itself in capitals; keeps what it got, and tells when a connection ended."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.ended = threading.Semaphore(0)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link, link.makefile("rb") as lines:
            try:
                for line in lines:
                    self.lines.append(line)
                    link.sendall(line.upper())
            except OSError:
                pass
        self.ended.release()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.listener.shutdown(socket.SHUT_RDWR)
    server.listener.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    before = threading.active_count()
    with Proxy(echo.port) as proxy:
        yield proxy
    assert not [thread for thread in threading.enumerate() if thread.name == f"proxy-{proxy.port}"], before


@pytest.fixture
def connect(proxy: Proxy) -> Iterator:
    links = []

    def open_link() -> socket.socket:
        link = socket.create_connection(("127.0.0.1", proxy.port), 10)
        link.settimeout(10)
        links.append(link)
        return link

    yield open_link
    for link in links:
        link.close()


def ask(link: socket.socket, line: bytes) -> bytes:
    link.sendall(line)
    return link.recv(100)


def silent(link: socket.socket, seconds: float = 0.2) -> bool:
    """Whether nothing comes, not even an end."""
    link.settimeout(seconds)
    try:
        return link.recv(1) is None
    except TimeoutError:
        return True
    finally:
        link.settimeout(10)


def test_forwards_both_ways_and_passes_the_end_on(echo, proxy, connect):
    link = connect()
    assert ask(link, b"one\n") == b"ONE\n"
    assert (proxy.connections, proxy.accepted) == (1, 1)
    link.shutdown(socket.SHUT_WR)
    assert link.recv(1) == b""
    proxy.wait_idle()
    assert echo.ended.acquire(timeout=10)


def test_delay_is_at_least_what_was_asked(proxy, connect):
    link = connect()
    ask(link, b"one\n")
    proxy.delay(0.2, "down")
    began = time.monotonic()
    assert ask(link, b"two\n") == b"TWO\n"
    assert time.monotonic() - began >= 0.2
    proxy.delay(0)
    began = time.monotonic()
    ask(link, b"three\n")
    assert time.monotonic() - began < 0.2


def test_hold_down_keeps_replies_back_until_release(echo, proxy, connect):
    link = connect()
    ask(link, b"one\n")
    proxy.hold("down")
    link.sendall(b"two\n")
    assert silent(link)
    assert echo.lines == [b"one\n", b"two\n"]
    proxy.release()
    assert link.recv(100) == b"TWO\n"


def test_hold_up_keeps_commands_back(echo, proxy, connect):
    link = connect()
    ask(link, b"one\n")
    proxy.hold("up")
    link.sendall(b"two\n")
    assert silent(link)
    assert echo.lines == [b"one\n"]
    proxy.release()
    assert link.recv(100) == b"TWO\n"


def test_freeze_is_for_old_connections_and_hides_their_end(echo, proxy, connect):
    old = connect()
    ask(old, b"one\n")
    assert proxy.freeze() == 1
    new = connect()
    assert ask(new, b"new\n") == b"NEW\n"
    old.sendall(b"lost\n")
    assert silent(old)
    old.close()
    assert not echo.ended.acquire(timeout=0.2)
    proxy.release()
    assert echo.ended.acquire(timeout=10)


def test_refuse_resets_new_connections_only(proxy, connect):
    old = connect()
    ask(old, b"one\n")
    proxy.refuse()
    with pytest.raises(ConnectionResetError):
        ask(connect(), b"two\n")
    assert ask(old, b"two\n") == b"TWO\n"
    proxy.refuse(False)
    assert ask(connect(), b"three\n") == b"THREE\n"


def test_reset_is_no_orderly_end(echo, proxy, connect):
    link = connect()
    ask(link, b"one\n")
    assert proxy.reset() == 1
    with pytest.raises(ConnectionResetError):
        link.recv(1)
    assert echo.ended.acquire(timeout=10)
    proxy.wait_idle()
    assert ask(connect(), b"two\n") == b"TWO\n"


def test_drop_is_an_orderly_end(proxy, connect):
    link = connect()
    ask(link, b"one\n")
    assert proxy.drop() == 1
    assert link.recv(1) == b""
    proxy.wait_idle()


def test_cut_in_the_middle_of_a_reply(echo, proxy, connect):
    link = connect()
    ask(link, b"one\n")
    proxy.cut(after=2, direction="down")
    link.sendall(b"three\n")
    assert link.recv(2) == b"TH"
    with pytest.raises(ConnectionResetError):
        link.recv(1)
    assert ask(connect(), b"four\n") == b"FOUR\n"
    assert echo.lines == [b"one\n", b"three\n", b"four\n"]


def test_cut_in_the_middle_of_a_command(echo, proxy, connect):
    link = connect()
    ask(link, b"one\n")
    proxy.cut(after=2, direction="up")
    link.sendall(b"three\n")
    with pytest.raises(ConnectionResetError):
        link.recv(1)
    assert echo.ended.acquire(timeout=10)
    assert b"three\n" not in echo.lines


def test_a_dropped_reply_was_run(echo, proxy, connect):
    link = connect()
    assert ask(link, b"one\n") == b"ONE\n"
    proxy.drop_reply(b"push")
    link.sendall(b"pu")
    assert silent(link, 0.05)
    link.sendall(b"sh\n")
    with pytest.raises(ConnectionResetError):
        link.recv(1)
    proxy.wait_dropped()
    assert echo.lines == [b"one\n", b"push\n"]
    assert ask(connect(), b"push\n") == b"PUSH\n"


def test_close_ends_held_and_blocked_connections(echo):
    proxy = Proxy(echo.port)
    with socket.create_connection(("127.0.0.1", proxy.port), 10) as link:
        proxy.wait_connections(1)
        proxy.hold()
        link.sendall(b"one\n" * 10)
        proxy.close()
        proxy.close()
        with pytest.raises(ConnectionResetError):
            link.recv(1)
    assert proxy.connections == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port), 10)


def test_a_target_that_is_gone_resets_the_client():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with Proxy(port) as proxy:
        with pytest.raises(ConnectionResetError), socket.create_connection(("127.0.0.1", proxy.port), 10) as link:
            link.recv(1)
        with pytest.raises(AssertionError, match="1 connections"):
            proxy.wait_connections(1, timeout=0.05)
