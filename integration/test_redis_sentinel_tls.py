"""Redis Sentinel with TLS: to the servers, to the sentinels, to both; verified, and never in plain. These run on the
Redis on PATH, for no server from a wheel can do it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from amqp.exceptions import AccessRefused

from integration.load import Load
from integration.rig import CeleryRig
from integration.test_redis_sentinel import KILLED, follows
from streambroker import connect
from streambroker.errors import AuthenticationError, StoreConnectionError
from streambroker.message import Message
from streambroker.testing.faults import Link, Proxy
from streambroker.testing.sentinel import Sentinel, SentinelGroup
from streambroker.testing.servers import RedisServer
from streambroker.testing.tls import Authority

pytestmark = pytest.mark.long

KIND = "redis"
REFUSED = r"ssl_\*.*CERTIFICATE_VERIFY_FAILED"
#: the first byte of what a client of TLS says
HANDSHAKE = 22


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def group(authority: Authority) -> Iterator[SentinelGroup]:
    """For tests that leave its primary alone."""
    with SentinelGroup(KIND, replicas=1, authority=authority, password="serv3r") as group:
        yield group


@pytest.fixture
def doomed(authority: Authority) -> Iterator[SentinelGroup]:
    with SentinelGroup(KIND, authority=authority) as group:
        yield group


def ca(authority: Authority) -> dict[str, Any]:
    return {"ssl_ca_certs": str(authority.ca_file)}


def ways(group: SentinelGroup, authority: Authority) -> dict[str, tuple[str, dict[str, Any]]]:
    """URL and options: TLS to all by the scheme, to the servers alone, to both by options as in Kombu."""
    trusted = ca(authority)
    encrypted = group.url(tls=True).replace("+rediss", "")
    return {"scheme": (group.url(tls=True), trusted),
            "servers": (group.url(), {"ssl": True, **trusted}),
            "options": (encrypted, {"ssl": True, **trusted, "sentinel_kwargs": {"ssl": True, **trusted}})}


# ---------------------------------------------------------------- trusted

@pytest.mark.parametrize("way", ["scheme", "servers", "options"])
def test_a_message_goes_and_comes(group: SentinelGroup, authority: Authority, prefix: str, way: str) -> None:
    url, options = ways(group, authority)[way]
    with closing(connect(url, master_name=group.name, prefix=prefix, **options)) as engine:
        engine.publish("q", [Message(b"", id="1")])
        with closing(engine.consume(["q"])) as consumer:
            (delivery,) = consumer.receive(2)
            consumer.ack_now(delivery)


@pytest.mark.parametrize("way", ["scheme", "options"])
def test_publishing_and_consuming_follow_a_failover(doomed: SentinelGroup, authority: Authority, prefix: str,
                                                    way: str) -> None:
    url, options = ways(doomed, authority)[way]
    with Load(url, prefix, ["q"], master_name=doomed.name, **options) as load:
        old = doomed.primary()
        old.kill()
        doomed.wait_primary(other_than=old)
        load.progress(100, 10)
    assert load.doubled() == []


def test_celery_follows_a_failover(doomed: SentinelGroup, authority: Authority, celery: CeleryRig) -> None:
    url, options = ways(doomed, authority)["options"]
    follows(doomed, celery, KILLED, "threads", url=url, **options)


@pytest.mark.parametrize("way", ["URL", "broker_use_ssl", "as for Kombu"])
def test_celery_says_whom_to_trust(group: SentinelGroup, authority: Authority, celery: CeleryRig, way: str) -> None:
    """As for Kombu's own transport: `broker_use_ssl` for the servers, `sentinel_kwargs` for the sentinels."""
    url, _ = ways(group, authority)["scheme"]
    own: dict[str, Any] = {"sentinel_kwargs": {"ssl": True, **ca(authority)}} if way == "as for Kombu" else {}
    if way == "URL":
        url = f"{url}?ssl_ca_certs={authority.ca_file}"
    elif way == "as for Kombu":
        url = url.replace("+rediss", "")
    celery.use(url, conf={} if way == "URL" else {"broker_use_ssl": ca(authority)}, master_name=group.name, **own)
    celery.send("work", "trusted")
    with celery.app.connection_for_read() as connection:
        assert connection.default_channel.queue_declare("celery", passive=True).message_count == 1


# ---------------------------------------------------------------- refused

@pytest.mark.parametrize(("way", "left_out", "said"), [
    ("scheme", "ssl_ca_certs", rf"sentinel 127.*{REFUSED}.*sentinel_kwargs={{'ssl': True"),
    ("servers", "ssl_ca_certs", rf"{REFUSED}"),
    ("options", "sentinel_kwargs", r"no sentinel answers"),
])
def test_nobody_is_trusted_without_being_told(group: SentinelGroup, authority: Authority, way: str, left_out: str,
                                              said: str) -> None:
    url, options = ways(group, authority)[way]
    del options[left_out]
    kind = AuthenticationError if "CERTIFICATE" in said else StoreConnectionError
    with pytest.raises(kind, match=said) as error:
        connect(url, master_name=group.name, **options).ping()
    assert "serv3r" not in str(error.value)


def test_celery_is_told_at_once(group: SentinelGroup, celery: CeleryRig) -> None:
    for url, options in ((group.url(tls=True), {}), (group.url(), {"ssl": True})):
        celery.use(url, master_name=group.name, **options)
        for attempt in (celery.app.connection_for_write().ensure_connection, lambda: celery.send("work", "any")):
            with pytest.raises(AccessRefused, match=REFUSED):
                attempt()


def test_a_sentinel_of_another_name_is_refused(group: SentinelGroup, authority: Authority) -> None:
    url = group.url(separator=",", tls=True).replace("127.0.0.1", "localhost")
    with pytest.raises(AuthenticationError, match=r"not valid for 'localhost'|doesn't match"):
        connect(url, master_name=group.name, **ca(authority)).ping()


def test_a_server_of_another_name_is_refused(authority: Authority, prefix: str) -> None:
    with SentinelGroup(KIND, replicas=1, authority=authority, named="elsewhere.example.org") as group:
        for url, options in ways(group, authority).values():
            with pytest.raises(AuthenticationError, match=r"as the primary.*(not valid for '127\.0|doesn't match)"):
                connect(url, master_name=group.name, **options).ping()
        with closing(connect(url, master_name=group.name, **options, ssl_check_hostname=False)) as engine:
            assert engine.ping() < 5


class Recorder(Proxy):
    """Keeps what clients send: the first byte of each, and everything."""

    def __init__(self, target: int) -> None:
        self.first: dict[Link, int] = {}
        self.sent = b""
        super().__init__(target)

    def _forward(self, link: Link, way: str, data: bytes, sink: socket.socket) -> bool:
        if way == "up":
            self.first.setdefault(link, data[0])
            self.sent += data
        return super()._forward(link, way, data, sink)


def test_nothing_is_sent_in_plain(authority: Authority, prefix: str, tmp_path: Path) -> None:
    """To neither, by whom trusts nobody and by whom trusts."""
    with RedisServer(KIND, password="serv3r", authority=authority) as server, Recorder(server.port) as primary:
        sentinel = Sentinel(KIND, tmp_path, [f"sentinel monitor mymaster 127.0.0.1 {primary.port} 1",
                                             "sentinel auth-pass mymaster serv3r"], "sentin3l", authority)
        sentinel.process.start()
        try:
            with Recorder(sentinel.tls_port) as asked:
                url = f"sentinel-streams+rediss://:serv3r@127.0.0.1:{asked.port}"
                options = {"master_name": "mymaster", "prefix": prefix}
                theirs = {"password": "sentin3l"}
                for trusted in ({}, {"sentinel_kwargs": {**theirs, **ca(authority)}}):
                    with pytest.raises(AuthenticationError):
                        connect(url, **options, **{"sentinel_kwargs": theirs, **trusted}).ping()
                with closing(connect(url, **options, **ca(authority), sentinel_kwargs=theirs)) as engine:
                    engine.publish("q", [Message(b"the body", id="1")])
                assert len(asked.first) > 2
                for recorder in (primary, asked):
                    assert {*recorder.first.values()} == {HANDSHAKE}
                    for secret in (b"serv3r", b"sentin3l", b"the body", b"SENTINEL"):
                        assert secret not in recorder.sent
        finally:
            sentinel.process.kill()
