"""Real servers, workers and ledgers for the integration tests. A server that is missing is an error, not a skip."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.base import wait_at_base
from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.stores import Server, make_server
from integration.tally import TALLY, Report, Tally
from streambroker.testing.faults import Proxy
from streambroker.testing.natsserver import NatsServer, available_nats_kinds
from streambroker.testing.servers import RedisServer, available_kinds, required_kinds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--server", action="append", metavar="KIND",
                     help="run tests that use one server on this kind (repeat it, or `all`); default: valkey, and nats "
                          "too where the store makes a difference")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TALLY] = Tally()
    config.pluginmanager.register(Report(config.stash[TALLY]))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`kind` is each kind of --server. `every_kind` is each Redis among them, by default the oldest and the newest;
    `every_nats_kind` each nats-server among them, by default each that is here."""
    if "every_kind" in metafunc.fixturenames:
        metafunc.parametrize("every_kind", _redis_kinds(metafunc.config.getoption("--server") or []), scope="session")
    if "every_nats_kind" in metafunc.fixturenames:
        metafunc.parametrize("every_nats_kind", _nats_kinds(metafunc.config.getoption("--server") or []))
    if "kind" in metafunc.fixturenames:
        # of the session's scope, so that fixtures of a module can ask for it
        metafunc.parametrize("kind", _kinds(metafunc), scope="session")


def _redis_kinds(asked: list[str]) -> list[str]:
    if "all" in asked:
        return available_kinds()
    return [kind for kind in asked if not kind.startswith("nats")] or required_kinds()


def _nats_kinds(asked: list[str]) -> list[str]:
    return [kind for kind in asked if kind.startswith("nats")] or available_nats_kinds()


def _kinds(metafunc: pytest.Metafunc) -> list[Any]:
    """Those that the run asks for, or of each store that the test is for; what does not fit is skipped."""
    only = metafunc.definition.get_closest_marker("only_on")
    asked = metafunc.config.getoption("--server")
    if not asked:
        if only is not None:
            return ["nats" if only.args[0] == "nats" else "valkey"]
        return ["valkey", "nats"] if metafunc.definition.get_closest_marker("stores") else ["valkey"]
    kinds = [*available_kinds(), *available_nats_kinds()] if "all" in asked else asked
    if only is None:
        return kinds
    store, reason = only.args
    return [kind if (store == "nats") == kind.startswith("nats") else
            pytest.param(kind, marks=pytest.mark.skip(reason=reason)) for kind in kinds]


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    """The shared server of a kind, started at its first use. Tests keep apart by `prefix`."""
    running: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in running:
            running[kind] = make_server(kind).start()
            request.config.stash[TALLY].servers[kind] = running[kind].version()
        return running[kind]

    yield get
    for server in running.values():
        server.close()


@pytest.fixture(scope="session")
def nats_servers(servers: Callable[[str], Any]) -> Callable[[str], NatsServer]:
    """The same for kinds of nats-servers."""
    return servers


@pytest.fixture(scope="session")
def valkey(servers: Callable[[str], RedisServer]) -> RedisServer:
    """The shared Valkey."""
    return servers("valkey")


@pytest.fixture
def server(kind: str, servers: Callable[[str], Server]) -> Server:
    """The shared server of the kind that the run asks for (--server)."""
    return servers(kind)


@pytest.fixture
def every_server(every_kind: str, servers: Callable[[str], RedisServer]) -> RedisServer:
    """The test runs once for each kind of server that is here."""
    return servers(every_kind)


@pytest.fixture
def fresh(request: pytest.FixtureRequest, kind: str) -> Iterator[Callable[..., Server]]:
    """`fresh(**options of the server)` starts a server for this test alone: to be stopped, killed, frozen, filled."""
    started: list[Server] = []

    def start(**options: Any) -> Server:
        server = make_server(**{"kind": kind, **options})
        started.append(server)
        server.start()
        if not options.get("replica_of"):
            request.config.stash[TALLY].servers[server.kind] = server.version()
        return server

    yield start
    for server in started:
        server.close()


@pytest.fixture
def prefix() -> str:
    """A key prefix that no other test uses."""
    return f"t{uuid.uuid4().hex[:10]}"


@pytest.fixture
def at_base(server: Server, prefix: str) -> Iterator[None]:
    """Fails unless, when the test is over and its workers are gone, nothing of its jobs is left on the server. Ask for
    it before `celery`, so that it looks after that has ended the workers."""
    yield
    wait_at_base(server, prefix, 40)


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A fault proxy in front of the shared server: `server.url(port=proxy.port)`."""
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """What the test application's tasks of this test write to."""
    return Ledger(tmp_path / "ledger.jsonl")


@pytest.fixture
def celery(tmp_path: Path, ledger: Ledger, prefix: str) -> Iterator[CeleryRig]:
    """Applications and workers on the test application; see CeleryRig."""
    rig = CeleryRig(tmp_path, ledger, prefix)
    yield rig
    rig.close()


@pytest.fixture(autouse=True)
def root_level() -> None:
    """A Celery worker inside a test process sets the level of the root logger for all that comes after it."""
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture
def plain_celery(tmp_path: Path) -> Iterator[CeleryRig]:
    """With the default prefix, which README's permissions name."""
    rig = CeleryRig(tmp_path, Ledger(tmp_path / "ledger.jsonl"), "sb")
    yield rig
    rig.close()
