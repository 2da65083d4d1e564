"""What differs by store when a test looks at a server, or does something to it that no client of ours would do."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from streambroker.engines.jetstream.names import Names
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import RedisServer, wait_until

Server: TypeAlias = RedisServer | NatsServer

#: bytes of a message that fills a nats-server up
_FILLING = 1 << 20


def make_server(kind: str, **options: Any) -> Any:
    """A Redis, Valkey or nats-server, not started; how a Redis writes to its disk is nothing to a nats-server."""
    if kind.startswith("nats"):
        own = {name: value for name, value in options.items() if name not in ("aof", "fsync")}
        return NatsServer(kind, **{"max_payload": 8 << 20, **own})
    return RedisServer(kind, **options)


def scheme(url: object) -> str:
    return str(url).partition(":")[0]


def mark(server: Server, prefix: str, queue: str = "celery", *, step: int = 0, delayed: bool = False) -> bytes:
    """What each request that stores a message there contains, for `Proxy.drop_reply`."""
    if isinstance(server, NatsServer):
        names = Names(prefix)
        if not delayed:
            return names.ready(queue, step).encode()
        schedules = int(server.version().split(".")[1]) >= 12
        return (names.scheduled(queue, step, "") if schedules else names.lately(queue, step)).encode()
    return f"{prefix}:{{{queue}}}:{'delay' if delayed else f's:{step}'}".encode()


def mark_of_broadcasts(server: Server, prefix: str) -> bytes:
    return f"{Names(prefix).root}.f.".encode() if isinstance(server, NatsServer) else b"PUBLISH"


def put_foreign(server: Server, prefix: str, queue: str = "celery") -> None:
    """Put an entry into a queue that is none of ours."""
    if isinstance(server, NatsServer):
        assert b'"seq"' in server.call(Names(prefix).ready(queue, 0), b"of another program")
    else:
        with server.client() as client:
            client.xadd(f"{prefix}:{{{queue}}}:s:0", {"data": "of another program"})


def connects(server: Server) -> int:
    """Connections that the server has taken since it runs."""
    if isinstance(server, NatsServer):
        return int(server.look("varz")["total_connections"])
    with server.client() as client:
        return int(client.info("stats")["total_connections_received"])


def requests(server: Server, seconds: float) -> int:
    """How many messages or commands clients send in that time; what scripts do inside the server is not counted."""
    if isinstance(server, NatsServer):
        before = int(server.look("varz")["in_msgs"])
        time.sleep(seconds)
        return int(server.look("varz")["in_msgs"]) - before
    sent: Counter[str] = Counter()
    with server.client(socket_timeout=None) as watching, server.client() as ending, watching.monitor() as monitor:
        over = threading.Timer(seconds, ending.echo, ["over"])
        over.start()
        for line in monitor.listen():
            if line["command"] == "ECHO over":
                break
            if line["client_type"] != "lua":
                sent[" ".join(line["command"].split()[:2])] += 1
        over.join()
    return sent.total()


def unsettled(server: Server, prefix: str, queue: str = "celery") -> int:
    """Messages of the first step that consumers have, or had and have not settled."""
    if isinstance(server, NatsServer):
        names = Names(prefix)
        return int(server.api(f"CONSUMER.INFO.{names.main}.{names.durable(queue, 0)}")["num_ack_pending"])
    with server.client() as client:
        rows = client.xinfo_consumers(f"{prefix}:{{{queue}}}:s:0", "sb")
        # those that start with ~ are places, not processes
        return sum(row["pending"] for row in rows if not row["name"].startswith(b"~"))


@contextmanager
def slow_commands(server: Server, seconds: float) -> Iterator[list[str]]:
    """Filled at the end with the commands that took a Redis longer; a nats-server does not tell."""
    found: list[str] = []
    if isinstance(server, NatsServer):
        yield found
        return
    with server.client() as client:
        client.config_set("slowlog-log-slower-than", int(seconds * 1e6))
        client.slowlog_reset()
        yield found
        found += [f"{entry['duration']} us: {entry['command'][:60]}" for entry in client.slowlog_get(10)]


def lose_everything(server: Server, prefix: str) -> None:
    """Take all that is stored under a prefix, and all that the server has learnt."""
    if isinstance(server, NatsServer):
        root = Names(prefix).root
        for stream in server.streams():
            if stream["name"] == root or stream["name"].startswith(f"{root}_"):
                assert server.api(f"STREAM.DELETE.{stream['name']}")["success"]
    else:
        with server.client() as client:
            client.flushall()
            client.script_flush()


def lose_stream(server: NatsServer, name: str) -> None:
    """Delete a stream that somebody makes again. A nats-server takes what comes in the first moment after that for the
    old one: returns when there is a new one."""
    made = server.api(f"STREAM.INFO.{name}")["created"]
    assert server.api(f"STREAM.DELETE.{name}")["success"]
    wait_until(lambda: server.api(f"STREAM.INFO.{name}").get("created", made) != made, 10, f"a new stream {name}")


def lose_tables(server: Server, prefix: str) -> None:
    """Take exchanges, bindings and declared queues."""
    if isinstance(server, NatsServer):
        assert server.api(f"STREAM.DELETE.{Names(prefix).state}")["success"]
    else:
        with server.client() as client:
            assert client.delete(*(f"{prefix}:{{@}}:{key}" for key in (
                "t:exchanges", "v:exchanges", "t:bindings", "v:bindings", "t:queues", "v:queues"))) == 6


def can_be_full(kind: str) -> dict[str, int]:
    """Options of a server of that kind that `full` is for."""
    return {"max_store": 32 << 20} if kind.startswith("nats") else {}


@contextmanager
def full(server: Server, prefix: str) -> Iterator[str]:
    """While it takes no more messages: what it says then, as a pattern. See `can_be_full`."""
    if isinstance(server, NatsServer):
        name = f"filling-{prefix}"
        subject = f"filling.{prefix}"
        made = server.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [subject], "storage": "file"})
        assert "error" not in made, made
        # in ever smaller pieces, so that no room is left
        for size in (_FILLING, 1 << 14, 1 << 8):
            while b'"error"' not in server.call(subject, bytes(size)):
                pass
        try:
            yield "insufficient|maximum"
        finally:
            server.api(f"STREAM.DELETE.{name}")
    else:
        with server.client() as client:
            client.config_set("maxmemory", "1mb")
            try:
                yield "OOM"
            finally:
                client.config_set("maxmemory", "0")
