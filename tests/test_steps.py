"""The proxy that counts requests: what it takes for one, and what gets through."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from streambroker.testing.steps import Split, Steps, nats_requests, redis_requests

PING = b"*1\r\n$4\r\nPING\r\n"
SET = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$4\r\n\r\n*1\r\n"  # with a value that looks like a command
CONNECT = b'CONNECT {"verbose":false}\r\n'
PUB = b"PUB a.b reply 7\r\nPUB x 1\r\n"
HPUB = b"HPUB a.b 12 15\r\nNATS/1.0\r\n\r\nabc\r\n"


@pytest.mark.parametrize(("split", "requests"), [
    (redis_requests, [(PING, True), (SET, True), (PING, True)]),
    (nats_requests, [(CONNECT, False), (PUB, True), (b"PING\r\n", False), (HPUB, True), (PUB, True)]),
])
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_requests_are_told_apart_however_they_come(split: Split, requests: list[tuple[bytes, bool]], size: int) -> None:
    whole = b"".join(request for request, _ in requests)
    buffer = bytearray()
    found = []
    for start in range(0, len(whole), size):
        buffer += whole[start:start + size]
        found += split(buffer)
    assert found == requests
    assert not buffer


class Sink:
    """Keeps what it gets of one connection; `whole` is set when that has ended."""

    def __init__(self) -> None:
        self.got = b""
        self.whole = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        link, _ = self.listener.accept()
        with link:
            while data := link.recv(65536):
                self.got += data
        self.whole.set()


@pytest.fixture
def sink() -> Iterator[Sink]:
    sink = Sink()
    yield sink
    sink.listener.close()


def test_so_many_steps_get_through_and_what_was_kept_back_never_does(sink: Sink) -> None:
    with Steps(sink.port, nats_requests) as steps, socket.create_connection(("127.0.0.1", steps.port)) as client:
        client.sendall(CONNECT)
        steps.wait_connections(1)
        steps.allow(2)
        client.sendall(PUB + b"PING\r\n" + HPUB)
        client.sendall(PUB)
        assert steps.wait_stopped() == PUB
        steps.forget()
        assert sink.whole.wait(5)
    assert sink.got == CONNECT + PUB + b"PING\r\n" + HPUB


def test_without_an_allowance_all_gets_through(sink: Sink) -> None:
    with Steps(sink.port, redis_requests) as steps:
        with socket.create_connection(("127.0.0.1", steps.port)) as client:
            client.sendall(PING * 100)
        assert sink.whole.wait(5)
    assert sink.got == PING * 100
