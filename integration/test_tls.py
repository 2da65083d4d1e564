"""`rediss-streams://`: verified unless told otherwise, in every pool, with certificates of clients, over links that
break."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from amqp.exceptions import AccessRefused
from kombu import Connection

from integration.rig import CeleryRig
from streambroker import connect
from streambroker.errors import StoreConnectionError
from streambroker.testing.faults import Proxy
from streambroker.testing.servers import RedisServer
from streambroker.testing.tls import Authority, TlsFront

POOLS = ["prefork", "threads", "solo", "gevent", "eventlet"]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def front(server: RedisServer, authority: Authority) -> Iterator[TlsFront]:
    with TlsFront(server.port, authority) as front:
        yield front


def ca(authority: Authority) -> dict[str, Any]:
    return {"ssl_ca_certs": str(authority.ca_file)}


def ping(server: RedisServer, front: TlsFront, **options: Any) -> float:
    engine = connect(server.url("rediss-streams", port=front.port), **options)
    try:
        return engine.ping()
    finally:
        engine.close()


# ---------------------------------------------------------------- who is trusted

def test_a_certificate_of_a_known_authority_is_trusted(server: RedisServer, authority: Authority,
                                                       front: TlsFront) -> None:
    assert ping(server, front, **ca(authority)) < 5


def test_a_certificate_of_an_unknown_authority_is_refused(server: RedisServer, front: TlsFront,
                                                          tmp_path: Path) -> None:
    """Without any option, and with another authority's certificate."""
    with pytest.raises(StoreConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
        ping(server, front)
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    with pytest.raises(StoreConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
        ping(server, front, **ca(other))


def test_a_certificate_for_another_host_is_refused(server: RedisServer, authority: Authority) -> None:
    with TlsFront(server.port, authority, name="elsewhere.example.org") as front:
        with pytest.raises(StoreConnectionError, match=r"not valid for '127\.0\.0\.1'|doesn't match"):
            ping(server, front, **ca(authority))
        assert ping(server, front, **ca(authority), ssl_check_hostname=False) < 5


@pytest.mark.parametrize("how", ["none", "CERT_NONE", 0])
def test_verification_can_be_turned_off(server: RedisServer, front: TlsFront, how: Any) -> None:
    assert ping(server, front, ssl_cert_reqs=how) < 5


def test_a_client_shows_its_certificate(server: RedisServer, authority: Authority) -> None:
    client = {"ssl_certfile": str(authority.client_file), "ssl_keyfile": str(authority.client_file)}
    with TlsFront(server.port, authority, ask_client=True) as front:
        with pytest.raises(StoreConnectionError):
            ping(server, front, **ca(authority))
        assert ping(server, front, **ca(authority), **client) < 5


def test_plain_and_encrypted_ports_are_told_apart(server: RedisServer, front: TlsFront) -> None:
    """A mistaken scheme is an error soon, not a wait."""
    for url in (server.url("rediss-streams"), server.url(port=front.port)):
        engine = connect(url, publish_timeout=0)
        with pytest.raises(StoreConnectionError):
            engine.ping(timeout=3)
        engine.close()


# ---------------------------------------------------------------- Celery

def test_celery_trusts_nobody_without_being_told(server: RedisServer, front: TlsFront, celery: CeleryRig) -> None:
    """Unlike Kombu's `rediss://`. A publisher is told at once."""
    celery.use(server.url("rediss-streams", port=front.port))
    began = time.monotonic()
    for attempt in (celery.app.connection_for_write().ensure_connection, lambda: celery.send("work", "any")):
        with pytest.raises(AccessRefused, match=r"ssl_\*.*CERTIFICATE_VERIFY_FAILED"):
            attempt()
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("place", ["broker_use_ssl", "transport options", "URL"])
def test_celery_says_whom_to_trust(server: RedisServer, authority: Authority, front: TlsFront, celery: CeleryRig,
                                   place: str) -> None:
    """Where Kombu's Redis transport takes it from."""
    url = server.url("rediss-streams", port=front.port)
    if place == "broker_use_ssl":
        celery.use(url, conf={"broker_use_ssl": ca(authority)})
    elif place == "URL":
        celery.use(f"{url}?ssl_ca_certs={authority.ca_file}")
    else:
        celery.use(url, **ca(authority))
    celery.send("work", "trusted")
    with Connection(server.url(), transport_options={"global_keyprefix": celery.prefix}) as connection:
        assert connection.default_channel.queue_declare("celery", passive=True).message_count == 1


@pytest.mark.usefixtures("at_base")
def test_every_pool_works_over_tls(server: RedisServer, authority: Authority, front: TlsFront,
                                   celery: CeleryRig) -> None:
    """Large messages, many at once, remote control, and a link that is cut: nothing is lost or twice."""
    with Proxy(front.port) as proxy:
        celery.use(server.url("rediss-streams", port=proxy.port), queues=POOLS, **ca(authority))
        workers = [celery.worker(pool, start=False, pool=pool, options=["-Q", pool, "--without-mingle"])
                   for pool in POOLS]
        celery.start(*workers)
        for pool in POOLS:
            celery.send("work", f"large-{pool}", 0, "x" * 1_000_000, queue=pool)
            celery.send_all("work", [f"{pool}-{number}" for number in range(100)], queue=pool)
        celery.ledger.wait("end", 101 * len(POOLS), 40)
        assert len(celery.app.control.ping(timeout=5, limit=len(POOLS))) == len(POOLS)
        assert proxy.reset() > len(POOLS)
        for pool in POOLS:
            celery.send("work", f"after-{pool}", queue=pool)
        celery.ledger.wait("end", 102 * len(POOLS), 10)
        for pool in POOLS:
            celery.wait_stats(pool, ready=0, in_flight=0, dead=0)
        assert all(worker.alive for worker in workers)
        verdict = celery.ledger.verdict()
        assert verdict.clean and not verdict.doubled
        celery.finish()
