"""One connection whose bytes several threads send: parts, time limits, forks, ends."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streambroker.engines.jetstream.address import Address
from streambroker.engines.jetstream.link import Frame, Link, Reply
from streambroker.settings import Settings
from streambroker.testing.faults import Proxy
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import wait_until
from streambroker.testing.tls import Authority

INFO = Frame("$JS.API.INFO")
Make = Callable[..., Link]


@pytest.fixture(scope="module")
def shared() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture
def make() -> Iterator[Make]:
    """`make(url, **options)`: an open link, closed when the test is over."""
    links: list[Link] = []

    def new(url: str, **options: Any) -> Link:
        links.append(Link(Address(url, options), Settings(socket_timeout=3, socket_connect_timeout=2)))
        links[-1].open(5)
        return links[-1]

    yield new
    for link in links:
        link.close()


def end(link: Link) -> None:
    session = link.session
    assert session is not None
    link.call_soon(session._drop)


class Short:
    """A socket that takes a part only, and something happens meanwhile."""

    def __init__(self, sock: Any, meanwhile: Callable[[], None]) -> None:
        self._sock = sock
        self._meanwhile = meanwhile

    def send(self, data: bytes) -> int:
        sent: int = self._sock.send(data[:len(data) // 2])
        self._meanwhile()
        return sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def test_what_the_loop_says_does_not_get_into_a_command_that_was_sent_in_part(shared: NatsServer, make: Make) -> None:
    link = make(shared.url())
    came: list[Reply] = []
    link.listen("t.part.*", came.append)
    session: Any = link.session

    def loop_writes() -> None:
        written = threading.Event()

        def write() -> None:
            session.write(b"PUB t.part.loop 4\r\nloop\r\n")
            written.set()

        link.call_soon(write)
        assert written.wait(5)

    session._direct = Short(session._direct, loop_writes)
    assert link.post([Frame("t.part.thread", b"thread")])
    wait_until(lambda: len(came) == 2, 5, "both")
    assert [reply.data for reply in came] == [b"thread", b"loop"]
    assert link.epoch == 1


def test_nobody_waits_for_a_server_that_takes_nothing_though_sockets_have_a_default_time(make: Make) -> None:
    with NatsServer() as server:
        socket.setdefaulttimeout(5)
        try:
            link = make(server.url())
        finally:
            socket.setdefaulttimeout(None)
        server.freeze()
        start = time.monotonic()
        for _ in range(20):
            assert link.post([Frame("t.frozen", b"x" * 900_000)])
        assert time.monotonic() - start < 2.5
        server.thaw()


class TimeLimit(Exception):
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_time_limits_that_come_while_sending_leave_a_link_that_works(
        shared: NatsServer, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streambroker.engines.jetstream.connection._BRIEF", 0.0)
    link = make(shared.url())

    def over(number: int, frame: object) -> None:
        raise TimeLimit

    dice, hits = random.Random(7), 0
    previous = signal.signal(signal.SIGALRM, over)
    try:
        while hits < 200:
            try:
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(5e-6, 2e-4))
                try:
                    for _ in range(20):
                        link.post([Frame("t.limit", b"a" * 50)])
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except TimeLimit:
                hits += 1
                link.open(5)
                if hits % 10 == 0:
                    assert wait_until(lambda: link.requests([INFO], 1)[0], 3, "an answer")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_word_under_way_is_no_sign_of_death(shared: NatsServer, make: Make) -> None:
    with Proxy(shared.port) as proxy:
        link = make(shared.url(port=proxy.port))
        session: Any = link.session
        proxy.hold("down")
        thread = threading.Thread(target=link.flush, args=(3,))
        thread.start()
        wait_until(lambda: session._pongs, 5, "a ping")
        link.call_soon(lambda: session._look(session._words.heard, False))
        link.call_soon(proxy.release)
        thread.join()
        assert link.request(INFO, 3).data
        assert link.epoch == 1


def test_connections_that_end_at_once_are_not_made_again_without_a_pause(shared: NatsServer, make: Make) -> None:
    link = make(shared.url())
    before = link.epoch
    link.on_connect.append(lambda: end(link))
    end(link)
    time.sleep(1.0)  # how many there are in a time is the point
    assert 1 <= link.epoch - before <= 7


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_child_does_not_keep_its_parents_connection_up(make: Make, tmp_path: Path, *, encrypted: bool) -> None:
    authority = Authority(tmp_path)
    with NatsServer(tls=authority.server_file("127.0.0.1") if encrypted else None) as server:
        options = {"ssl_ca_certs": str(authority.ca_file)} if encrypted else {}
        link = make(server.url("tls" if encrypted else "nats"), **options)
        child = os.fork()
        if not child:
            time.sleep(30)
            os._exit(0)
        try:
            end(link)
            wait_until(lambda: link.epoch == 2 and link.connected, 5, "another connection")
            wait_until(lambda: len(server.look("connz")["connections"]) == 1, 5, "the first one to be gone")
            link.close()
            wait_until(lambda: not server.look("connz")["connections"], 5, "none")
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
