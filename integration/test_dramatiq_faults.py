"""Dramatiq's processes while links break and the store refuses: the same ones go on, soon after it is over, and nothing
runs twice."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dramatiq.errors import ConnectionClosed

from integration.dramatiq_worker import DramatiqCommand, DramatiqRig, dramatiq_place
from integration.ledger import Ledger
from integration.stores import Server, can_be_full, full, lose_stream, make_server, mark
from streambroker.testing.faults import Proxy
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import RedisServer, wait_until
from streambroker.testing.tls import Authority, TlsFront
from tests.dramatiq_rig import message

pytestmark = pytest.mark.stores

PREFIX = "faults"
#: ms
LEASE = 2000
SOON = 10.0
#: lines that one fault may cost in the log of a process
LINES = 30
SECRET = "s3cr3tw0rd"


@dataclass
class Crew:
    """A process behind a proxy and one that is not, which takes what is left to it."""

    server: Server
    proxy: Proxy
    rig: DramatiqRig
    behind: DramatiqCommand
    direct: DramatiqCommand
    counter: int = 0

    def send(self, actor: str) -> str:
        self.counter += 1
        self.rig.send(actor, f"{actor}-{self.counter}")
        return f"{actor}-{self.counter}"

    def until_behind(self, kind: str, actor: str, within: float) -> list[str]:
        """Send such jobs until the process behind the proxy writes that of one; the names of all."""
        pids, names = self.behind.pids(), []

        def written() -> bool:
            names.append(self.send(actor))
            return any(line.pid in pids and line.id in names for line in self.rig.ledger.lines(kind))

        wait_until(written, within, f"{kind} of a {actor} behind the proxy", pause=0.1)
        return names

    def work_again(self, within: float = SOON) -> None:
        self.rig.wait("end", *self.until_behind("end", "ends", within), seconds=within)

    def held(self) -> list[str]:
        """Jobs that run, one at least in the process behind the proxy."""
        names = self.until_behind("start", "hold", SOON)
        self.rig.wait("start", *names)
        return names

    def released(self, names: list[str]) -> None:
        """They end, and have not begun anywhere else."""
        self.rig.flag("release")
        self.rig.wait("end", *names)
        self.rig.broker.join("default", timeout=10_000)
        (self.rig.flags / "release").unlink()
        assert [self.rig.count("start", name) for name in names] == [1] * len(names)


@pytest.fixture(scope="module")
def shared_crew(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    folder = tmp_path_factory.mktemp("faults")
    with make_server(kind, **can_be_full(kind)) as server, Proxy(server.port) as proxy:
        rig = DramatiqRig(server, folder, Ledger(folder / "ledger.jsonl"), PREFIX, visibility_timeout=LEASE,
                          publish_timeout=2000, socket_timeout=1.0, block_timeout=1000)
        try:
            direct = rig.command(threads=8)
            rig.settings["options"]["url"] = dramatiq_place(server, proxy.port)[1]
            yield Crew(server, proxy, rig, rig.command(threads=8), direct)
        finally:
            rig.close()


@pytest.fixture
def crew(shared_crew: Crew) -> Iterator[Crew]:
    """At work before and after the test, in the same processes, with few words."""
    commands = [shared_crew.behind, shared_crew.direct]
    shared_crew.work_again()
    pids = [command.pids() for command in commands]
    written = [len(command.log.read_text().splitlines()) for command in commands]
    yield shared_crew
    shared_crew.work_again()
    assert [command.pids() for command in commands] == pids
    shared_crew.rig.broker.join("default", timeout=10_000)
    for command, count in zip(commands, written, strict=True):
        said = command.log.read_text().splitlines()[count:]
        assert len(said) < LINES, "\n".join(said)


def test_links_are_cut_and_the_server_restarts(crew: Crew) -> None:
    """Nobody else gets what runs meanwhile: not by a proof of death, nor by the end of a lease."""
    names = crew.held()
    for _ in range(3):
        assert crew.proxy.reset()
        crew.work_again()
    time.sleep(1.3 * LEASE / 1000)
    crew.server.restart(hard=True)
    crew.work_again()
    time.sleep(1.3 * LEASE / 1000)
    crew.released(names)


def test_half_open_links(crew: Crew) -> None:
    """Nothing comes through and nobody says so. With the default `socket_timeout` it takes half a minute."""
    crew.proxy.freeze()
    try:
        crew.work_again(20)
    finally:
        crew.proxy.release()


def test_the_store_is_full(crew: Crew) -> None:
    """Acknowledgements pass, leases are kept, publishers are told."""
    names = crew.held()
    with full(crew.server, PREFIX) as refusal, pytest.raises(ConnectionClosed, match=refusal):
        crew.send("work")
    with full(crew.server, PREFIX):
        crew.released(names)
        wait_until(lambda: crew.rig.broker.engine.inspector().stats("default").in_flight == 0, 5, "acknowledged")


def test_a_stream_is_deleted(crew: Crew) -> None:
    """While processes wait for it."""
    if isinstance(crew.server, NatsServer):
        lose_stream(crew.server, PREFIX)
    else:
        with crew.server.client() as client:
            assert client.delete(f"{PREFIX}:{{default}}:s:0") == 1


# ---------------------------------------------------------------- publishing

@pytest.mark.parametrize("delay", [None, 60_000])
def test_an_enqueue_whose_answer_is_lost_is_there_once(server: Server, proxy: Proxy, prefix: str,
                                                       delay: int | None) -> None:
    kind, url = dramatiq_place(server, proxy.port)
    broker = kind(url=url, prefix=prefix)
    broker.enqueue(message("first"), delay=delay)
    proxy.drop_reply(mark(server, prefix, "default", delayed=delay is not None))
    broker.enqueue(message("repeated"), delay=delay)
    proxy.wait_dropped()
    assert broker.get_queue_message_counts("default") == ((2, 0, 0) if delay is None else (0, 2, 0))
    broker.close()


# ---------------------------------------------------------------- secrets and TLS

def locked(kind: str) -> dict[str, Any]:
    """Options of a server that asks for the password."""
    return {"users": {"jobs": SECRET}} if kind.startswith("nats") else {"password": SECRET}


def test_a_life_of_a_process_shows_the_password_nowhere(
        fresh: Callable[..., Server], kind: str, tmp_path: Path, ledger: Ledger, prefix: str,
        caplog: pytest.LogCaptureFixture) -> None:
    """A store that is away, a wrong password, and all that is written of it."""
    server = fresh(**locked(kind))
    rig = DramatiqRig(server, tmp_path, ledger, prefix, publish_timeout=300)
    errors: list[BaseException] = []
    with caplog.at_level("DEBUG"):
        try:
            command = rig.command("--verbose")
            rig.send("work", "first")
            rig.wait("end", "first")
            server.kill()
            with pytest.raises(ConnectionClosed) as away:
                rig.send("work", "refused")
            errors.append(away.value)
            server.start()
            wait_until(lambda: rig.broker.engine.ping() > 0, 10, "the store is back")
            rig.send("work", "second")
            rig.wait("end", "second")
            url = str(rig.settings["options"]["url"])
            assert SECRET in url
            wrong = type(rig.broker)(url=url.replace(SECRET, f"no-{SECRET}"), prefix=prefix, publish_timeout=300)
            with pytest.raises(ConnectionClosed) as refused:
                wrong.enqueue(message("refused"))
            errors.append(refused.value)
            seen = [repr(wrong), repr(wrong.engine), repr(rig.broker.engine)]
            wrong.close()
        finally:
            rig.close()
    assert "[DEBUG]" in command.log.read_text()
    seen += ["".join(traceback.format_exception(error)) for error in errors]
    for text in [*seen, command.log.read_text(), caplog.text]:
        assert SECRET not in text


def test_nobody_is_trusted_without_being_told(fresh: Callable[..., Server], kind: str, tmp_path: Path,
                                              prefix: str) -> None:
    authority = Authority(tmp_path)
    options = {"ssl_ca_certs": str(authority.ca_file), "prefix": prefix, "publish_timeout": 1000}
    server = fresh(**({"tls": authority.server_file("127.0.0.1")} if kind.startswith("nats") else {}))
    with TlsFront(server.port, authority) as front:
        broker, _ = dramatiq_place(server)
        url = server.url("rediss", port=front.port) if isinstance(server, RedisServer) else server.url("tls")
        stranger = broker(url=url, prefix=prefix, publish_timeout=1000)
        with pytest.raises(ConnectionClosed, match=r"CERTIFICATE_VERIFY_FAILED|certificate verify failed"):
            stranger.enqueue(message("refused"))
        stranger.close()
        friend = broker(url=url, **options)
        friend.enqueue(message("trusted"))
        assert friend.get_queue_message_counts("default") == (1, 0, 0)
        friend.close()
