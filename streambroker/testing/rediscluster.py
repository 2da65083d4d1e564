"""A Redis or Valkey cluster on free ports of 127.0.0.1, for tests.

    with RedisCluster("valkey", replicas=1) as cluster:
        cluster.url()                    # cluster-streams://127.0.0.1:PORT;127.0.0.1:PORT;...
        cluster.master_of("sb:{celery}").kill()
        cluster.migrate(slot, cluster.masters()[1])
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import redis
from redis.crc import key_slot

from ..embedded import free_port
from ..engines.redis_streams.link import Link
from .servers import RedisServer, wait_until

SLOTS = 16384
#: from a server's port to that on which it talks to the others
_BUS = 10000
#: with its bus port a server stays below the ephemeral ports
_PORTS = range(20000, 22700)


def _port() -> int:
    while (port := free_port()) not in _PORTS or not _is_free(port + _BUS):
        pass
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class RedisCluster:
    """`masters` servers of one kind that share the slots, each with `replicas` more that follow it; a master that is
    silent for `node_timeout` seconds is replaced. `arguments` are further ones of each server. `front` says, by its own
    port, behind which port clients find a server (masters only)."""

    def __init__(self, kind: str = "valkey", *, masters: int = 3, replicas: int = 0, node_timeout: float = 1.0,
                 arguments: Sequence[str] = (), front: Callable[[int], int] | None = None, **options: Any) -> None:
        self._masters = masters
        cluster = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-node-timeout",
                   f"{node_timeout * 1000:.0f}", "--cluster-announce-ip", "127.0.0.1", "--repl-diskless-sync-delay",
                   "0", "--cluster-replica-validity-factor", "0"]
        self.servers = []
        for _ in range(masters * (1 + replicas)):
            port = _port()
            announced = ["--cluster-announce-port", str(front(port))] if front else []
            self.servers.append(RedisServer(kind, arguments=[*cluster, *announced, *arguments], port=port, **options))

    def start(self) -> RedisCluster:
        """Start all and join them; returns when each knows that all is well."""
        try:
            self._join()
        except BaseException:
            self.close()
            raise
        return self

    def _join(self) -> None:
        for server in self.servers:
            server.process.launch()
        for server in self.servers:
            server.process.wait_ready()
        first, *others = self.servers
        for server in others:
            self.ask(server, "CLUSTER", "MEET", first.host, first.port)
        share = -(-SLOTS // self._masters)
        for number, server in enumerate(self.servers[:self._masters]):
            # ADDSLOTSRANGE is there from Redis 7.0 on
            self.ask(server, "CLUSTER", "ADDSLOTS", *range(number * share, min(SLOTS, (number + 1) * share)))
        wait_until(lambda: all(len(self._nodes(server)) == len(self.servers) for server in self.servers), 20,
                   "all know each other", pause=0.05)
        names = {server.port: self.ask(server, "CLUSTER", "MYID").decode() for server in self.servers}
        for number, server in enumerate(self.servers[self._masters:]):
            self.ask(server, "CLUSTER", "REPLICATE", names[self.servers[number % self._masters].port])
        self.wait_well()

    def wait_well(self, timeout: float = 30.0) -> None:
        """Until every living server sees all slots served, and every replica follows a living master."""
        wait_until(lambda: all(self._is_well(server) for server in self.servers if server.process.alive), timeout,
                   "a cluster that is well", pause=0.05)

    def _is_well(self, server: RedisServer) -> bool:
        state = self.ask(server, "CLUSTER", "INFO")
        if b"cluster_state:ok" not in state or f"cluster_known_nodes:{len(self.servers)}".encode() not in state:
            return False
        with server.client() as client:
            found: dict[str, Any] = client.info("replication")
        replicas = len(self.servers) // self._masters - 1
        return found["role"] == "slave" and found["master_link_status"] == "up" or (
            found["role"] == "master" and (not replicas or found["connected_slaves"] >= 1))

    @staticmethod
    def ask(server: RedisServer, *words: Any) -> Any:
        """One command to one server, the plain answer."""
        with server.client() as client:
            options: dict[str, Any] = client.connection_pool.connection_kwargs
        link = Link(lambda timeout: redis.Connection(**options), 20)  # type: ignore[no-untyped-call]
        try:
            link.open()
            return link.call(*words)
        finally:
            link.close()

    def _nodes(self, server: RedisServer) -> list[list[str]]:
        return [line.split() for line in self.ask(server, "CLUSTER", "NODES").decode().splitlines()]

    def living(self) -> list[RedisServer]:
        return [server for server in self.servers if server.process.alive]

    def masters(self) -> list[RedisServer]:
        """Living servers that have slots, in the order of the first."""
        found = [server for server in self.living() if self.ask(server, "ROLE")[0] == b"master"]
        return [server for server in found if self._first_slot(server) < SLOTS]

    def _first_slot(self, server: RedisServer) -> int:
        rows = self.ask(server, "CLUSTER", "SLOTS")
        return min((row[0] for row in rows if row[2][1] == server.port), default=SLOTS)

    def master_of(self, key: str | int) -> RedisServer:
        """The living server that serves a key or slot and knows it."""
        slot = key if isinstance(key, int) else key_slot(key.encode())
        for server in self.masters():
            rows = self.ask(server, "CLUSTER", "SLOTS")
            if any(row[0] <= slot <= row[1] and row[2][1] == server.port for row in rows):
                return server
        raise LookupError(f"nobody serves {key!r}")

    def replicas_of(self, master: RedisServer) -> list[RedisServer]:
        return [server for server in self.living() if server is not master
                and self.ask(server, "ROLE")[:3] == [b"slave", master.host.encode(), master.port]]

    def migrate(self, slot: int, target: RedisServer, pause: Callable[[bytes], object] = lambda key: None) -> int:
        """Move a slot as `redis-cli --cluster reshard` does, key by key in their order; how many keys it had. `pause`
        is called after each key."""
        source = self.master_of(slot)
        if source is target:
            return 0
        ours, theirs = (self.ask(server, "CLUSTER", "MYID").decode() for server in (source, target))
        self.ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", ours)
        self.ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", theirs)
        moved = 0
        while keys := sorted(self.ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 1000)):
            self.ask(source, "MIGRATE", target.host, target.port, keys[0], 0, 5000)
            moved += 1
            pause(keys[0])
        for server in (target, source, *(other for other in self.masters() if other not in (source, target))):
            self.ask(server, "CLUSTER", "SETSLOT", slot, "NODE", theirs)
        return moved

    def url(self, scheme: str = "cluster-streams", *, user: str = "", password: str = "") -> str:
        """All servers."""
        password = password or self.servers[0].password
        login = f"{user}:{password}@" if user or password else ""
        return f"{scheme}://{login}" + ";".join(f"{server.host}:{server.port}" for server in self.servers)

    def client(self, **options: Any) -> redis.RedisCluster:
        first = self.living()[0]
        return redis.RedisCluster(first.host, first.port, password=first.password or None, **options)

    def version(self) -> str:
        return f"{self.servers[0].version()} cluster"

    def keys(self, pattern: str = "*") -> dict[str, str]:
        """Keys of all masters with their type and size."""
        return {key: size for server in self.masters() for (_, key), size in server.base(pattern).keys.items()}

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def __enter__(self) -> RedisCluster:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()
