"""A client of redis-py that the user has set up already says where the store is and how to log in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.sentinel import Sentinel

from integration.rig import CeleryRig
from streambroker import Message, connect
from streambroker.errors import ConfigurationError
from streambroker.testing.servers import RedisServer
from streambroker.testing.tls import Authority, TlsFront

SECRET = "s3cr3t:p@ss/w%rd"


@pytest.mark.parametrize("what", ["client", "pool", "unix socket", "TLS"])
def test_a_client_or_its_pool_takes_the_place_of_a_url(fresh: Callable[..., RedisServer], tmp_path: Path, prefix: str,
                                                       what: str) -> None:
    """Row 67: it is neither used nor closed."""
    server = fresh(password=SECRET, unix_socket=True)
    authority = Authority(tmp_path)
    with TlsFront(server.port, authority) as front:
        own = {
            "client": lambda: redis.Redis(port=server.port, password=SECRET, db=3, decode_responses=True),
            "pool": lambda: redis.Redis(connection_pool=redis.BlockingConnectionPool(
                port=server.port, password=SECRET, db=3)),
            "unix socket": lambda: redis.Redis(unix_socket_path=str(server.socket_path), password=SECRET, db=3),
            "TLS": lambda: redis.Redis(host="127.0.0.1", port=front.port, password=SECRET, db=3, ssl=True,
                                       ssl_ca_certs=str(authority.ca_file)),
        }[what]()
        own.set("mine", "1")
        engine = connect("redis-streams://", client=own.connection_pool if what == "pool" else own, prefix=prefix)
        engine.publish("q", [Message(b"hello")])
        consumer = engine.consume(["q"])
        [delivery] = consumer.receive(5)
        assert delivery.message.body == b"hello"
        with server.client(db=3) as client:
            assert client.exists(f"{prefix}:{{q}}:s:0")
            others = [row for row in client.client_list() if row["name"] == "streambroker"]
            assert len(others) >= 2
        consumer.ack(delivery)
        engine.close()
        assert SECRET not in repr(engine)
        assert own.get("mine") in ("1", b"1")
        own.close()


def test_celery_takes_it_too(fresh: Callable[..., RedisServer], celery: CeleryRig) -> None:
    server = fresh(password=SECRET)
    for database in (1, 2):
        celery.use("redis-streams://", client=redis.Redis(port=server.port, password=SECRET, db=database))
        celery.send("work", "anything")
        assert celery.app.control.ping(timeout=0.1) == []
        with server.client(db=database) as client:
            assert client.xlen(f"{celery.prefix}:{{celery}}:s:0") == 1
    with pytest.raises(ConfigurationError, match="leave that out"):
        celery.use("redis-streams://elsewhere/1", client=redis.Redis())
        celery.send("work", "refused")


@pytest.mark.parametrize("client", [
    redis.asyncio.Redis(), Sentinel([("localhost", 1)]).master_for("any"), "redis://localhost", object()],
    ids=["asynchronous", "Sentinel", "text", "anything"])
def test_what_cannot_serve_is_refused_with_the_reason(client: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"redis\.Redis or redis\.ConnectionPool.*credential_provider"):
        connect("redis-streams://", client=client)


@pytest.mark.parametrize(("url", "options"), [
    ("redis-streams://localhost", {}), ("redis-streams:///1", {}), ("redis-streams://?db=1", {}),
    ("redis-streams://", {"password": "x"})])
def test_two_places_at_once_are_refused(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="the option client says where"):
        connect(url, client=redis.Redis(), **options)
