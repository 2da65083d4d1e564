"""Kombu over jetstream://: every way to log in, TLS, domains, accounts; secrets stay secret."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kombu
import nkeys
import pytest
from kombu.exceptions import OperationalError

from streambroker.connection import connect
from streambroker.message import Message
from streambroker.testing.natsjwt import KeyPair, Operator
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.tls import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(autouse=True)
def debug(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG):
        yield


def round_trip(url: str, **options: Any) -> str:
    """A message there and back by Kombu, and a delayed one; what the connection says of itself."""
    options.setdefault("prefix", f"t{uuid.uuid4().hex[:8]}")
    with kombu.Connection(url, transport_options=options, connect_timeout=5) as connection:
        queue = connection.SimpleQueue("jobs")
        queue.put({"number": 1})
        message = queue.get(timeout=5)
        assert message.payload == {"number": 1}
        message.ack()
        queue.producer.publish({"number": 2}, headers={}, routing_key="jobs", exchange="jobs")
        message = queue.get(timeout=5)
        message.requeue()
        again = queue.get(timeout=5)
        assert again.payload == {"number": 2}
        again.ack()
        queue.close()
        told = {name: value for name, value in connection.info().items()
                if name not in ("password", "transport_options")}
        return f"{connection!r} {connection.as_uri()} {connection.transport!r} {told}"


@pytest.mark.parametrize("how", ["password", "token", "nkey", "creds"])
def test_logging_in(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = f"s{uuid.uuid4().hex}"
    options: dict[str, Any] = {}
    if how == "password":
        server = NatsServer(users={"jobs": secret})
    elif how == "token":
        server = NatsServer(token=secret)
    elif how == "nkey":
        key = KeyPair(nkeys.PREFIX_BYTE_USER)
        server, secret = NatsServer(nkey=key.public), key.seed
        options["nkeys_seed_str"] = key.seed
    else:
        operator = Operator()
        server = NatsServer(config=operator.config)
        (tmp_path / "jobs.creds").write_text(operator.credentials("jobs"))
        options["user_credentials"] = str(tmp_path / "jobs.creds")
        secret = next(line for line in operator.credentials("jobs").splitlines() if line.startswith("SU"))[:20]
    with server:
        told = round_trip(server.url(), **options)
    assert secret not in told
    assert secret not in caplog.text


def test_wrong_logins_are_refused_at_once() -> None:
    with NatsServer(users={"jobs": "right"}) as server:
        connection = kombu.Connection(server.url(user="jobs", password="wrongsecret"), connect_timeout=5)
        with pytest.raises((OperationalError, *connection.connection_errors)) as caught:
            connection.ensure_connection(max_retries=1, interval_start=0.1)
        connection.release()
    assert "wrongsecret" not in str(caught.value)


def test_tls_is_verified_and_may_be_mutual(authority: Authority) -> None:
    ca = {"ssl_ca_certs": str(authority.ca_file)}
    with NatsServer(tls=authority.server_file("127.0.0.1"), ask_client=authority.ca_file) as server:
        url = server.url("jetstream-tls")
        round_trip(url, ssl_certfile=str(authority.client_file), **ca)
        for options in ({}, ca):
            connection = kombu.Connection(url, transport_options=options, connect_timeout=2)
            with pytest.raises(OperationalError):
                connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=3)
            connection.release()


def test_a_domain() -> None:
    with NatsServer(config="") as server:
        server.stop()
        text = server.configuration.read_text()
        server.configuration.write_text(text.replace("jetstream {", "jetstream { domain: hub, "))
        server.start()
        round_trip(server.url(), domain="hub")
        engine, other = connect(server.url(), domain="hub", prefix="d"), connect(server.url(), domain="hub", prefix="d")
        engine.publish("q", [Message(b"a"), Message(b"b", delay=1.2)])
        consumer = engine.consume(["q"])
        got = consumer.receive(5)
        consumer.nack(got[0])
        got = consumer.receive(5)
        assert [(each.message.body, each.count) for each in got] == [(b"a", 2)]
        consumer.ack(got[0])
        assert [each.message.body for each in consumer.receive(5)] == [b"b"]
        assert other.inspector().stats("q").in_flight == 1
        engine.close()
        other.close()


def test_accounts_never_meet() -> None:
    accounts = ('accounts { A { jetstream: enabled, users: [{user: a, password: a}] }, '
                'B { jetstream: enabled, users: [{user: b, password: b}] } }')
    with NatsServer(config=accounts) as server:
        here = connect(server.url(user="a", password="a"), prefix="same")
        there = connect(server.url(user="b", password="b"), prefix="same")
        here.publish("jobs", [Message(b"here")])
        assert here.ready("jobs") == 1
        assert there.ready("jobs") == 0
        there.publish("jobs", [Message(b"there")])
        got = there.consume(["jobs"]).receive(5, 10)
        assert [each.message.body for each in got] == [b"there"]
        here.close()
        there.close()
