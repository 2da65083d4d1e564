"""A primary, its replicas and three sentinels on free ports of 127.0.0.1, for tests.

    with SentinelGroup("valkey") as group:
        connect(group.url(), master_name=group.name)
        group.primary().kill(); group.failover(); group.wait_primary(other_than=server)
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..embedded import ServerProcess, answers_ping, free_port
from .servers import RedisServer, server_binary, wait_until

if TYPE_CHECKING:
    from .tls import Authority

QUORUM = 2


class Sentinel:
    """One sentinel process. It writes to its configuration by itself. With an `authority` it speaks TLS to the servers
    and to other sentinels, and takes encrypted links on `tls_port` beside plain ones on `port`."""

    def __init__(self, kind: str, folder: Path, lines: list[str], password: str,
                 authority: Authority | None = None) -> None:
        self.port = free_port()
        self.tls_port = free_port()
        self.password = password
        configuration = folder / f"sentinel-{self.port}.conf"
        own = [f"port {self.port}", "bind 127.0.0.1", f"dir {folder}"]
        if authority is not None:
            own += authority.redis_lines(self.tls_port, "127.0.0.1")
        if password:
            own += [f"requirepass {password}", f"sentinel sentinel-pass {password}"]
        configuration.write_text("\n".join([*own, *lines]) + "\n")
        self.process = ServerProcess([server_binary(kind), configuration, "--sentinel"],
                                     log=folder / f"sentinel-{self.port}.log",
                                     ready=lambda: answers_ping(("127.0.0.1", self.port)))

    def client(self) -> redis.Redis:
        """Close it, or use it as a context."""
        return redis.Redis(port=self.port, password=self.password or None, protocol=2, decode_responses=True,
                           socket_timeout=5, retry=Retry(NoBackoff(), 0))

    def ask(self, *words: str) -> Any:
        """The plain answer to `SENTINEL <words>`: what redis-py makes of it differs by version."""
        with self.client() as client:
            return client.execute_command("SENTINEL", *words)


class SentinelGroup:
    """`min_replicas` is the primary's min-replicas-to-write, and each replica's, since it may become one. `password` is
    the servers' own, `sentinel_password` the sentinels'. With an `authority` servers take encrypted links alone, with
    certificates for `named`, and sentinels both. Raises ConfigurationError when there is no such server here.
    """

    def __init__(self, kind: str = "valkey", *, replicas: int = 2, sentinels: int = 3, min_replicas: int = 1,
                 password: str = "", sentinel_password: str = "", name: str = "mymaster",
                 authority: Authority | None = None, named: str = "127.0.0.1") -> None:
        self.kind = kind
        self.name = name
        self._folder = Path(tempfile.mkdtemp(prefix="sb-sentinel-"))
        arguments = ["--min-replicas-to-write", str(min_replicas), "--repl-diskless-sync-delay", "0"]
        common: dict[str, Any] = {
            "password": password, "arguments": arguments, "authority": authority, "named": named}
        first = RedisServer(kind, **common)
        self.servers = [first, *(RedisServer(kind, replica_of=first, **common) for _ in range(replicas))]
        lines = [f"sentinel monitor {name} 127.0.0.1 {first.port} {QUORUM}",
                 f"sentinel down-after-milliseconds {name} 1000", f"sentinel failover-timeout {name} 3000",
                 f"sentinel parallel-syncs {name} 2"]
        if password:
            lines.append(f"sentinel auth-pass {name} {password}")
        self.sentinels = [Sentinel(kind, self._folder, lines, sentinel_password, authority) for _ in range(sentinels)]

    def start(self) -> SentinelGroup:
        """Returns when all know each other, and a failover may begin."""
        for server in self.servers:
            server.start()
        for sentinel in self.sentinels:
            sentinel.process.start()
        wait_until(lambda: all(self.is_whole(sentinel) for sentinel in self.sentinels), 30, "the sentinels see all",
                   pause=0.1)
        return self

    def is_whole(self, sentinel: Sentinel) -> bool:
        """Whether that sentinel sees everybody, and all replicas follow the primary."""
        state = _pairs(sentinel.ask("MASTER", self.name))
        replicas = [_pairs(row) for row in sentinel.ask("REPLICAS", self.name)]
        return (int(state["num-other-sentinels"]) == len(self.sentinels) - 1 and "down" not in state["flags"]
                and len(replicas) == len(self.servers) - 1
                and all(replica["master-link-status"] == "ok" for replica in replicas))

    def url(self, db: int = 0, separator: str = ";", *, tls: bool = False) -> str:
        """With a semicolon as Kombu wants it, with a comma as one URL. With `tls` of the sentinels' encrypted ports."""
        password = self.servers[0].password
        login = f":{password}@" if password else ""
        scheme = "sentinel-streams+rediss" if tls else "sentinel-streams"
        places = [f"127.0.0.1:{each.tls_port if tls else each.port}" for each in self.sentinels]
        if separator == ",":
            return f"{scheme}://{login}{','.join(places)}/{db}"
        return separator.join(f"{scheme}://{login}{place}/{db}" for place in places)

    def primary(self) -> RedisServer:
        """What the first sentinel that answers names."""
        for sentinel in self.sentinels:
            if sentinel.process.alive:
                _, port = sentinel.ask("GET-MASTER-ADDR-BY-NAME", self.name)
                return next(server for server in self.servers if server.port == int(port))
        raise AssertionError("no sentinel lives")

    def wait_primary(self, other_than: RedisServer, timeout: float = 20.0) -> RedisServer:
        """The new primary, once it is named."""
        found: RedisServer = wait_until(lambda: self.primary() is not other_than and self.primary(), timeout,
                                        "another primary is named", pause=0.05)
        return found

    def failover(self) -> None:
        """Ask for a planned failover, which is refused while an earlier one goes on."""
        self.sentinels[0].ask("FAILOVER", self.name)

    def close(self) -> None:
        for sentinel in self.sentinels:
            if sentinel.process.alive:
                sentinel.process.kill()
        for server in self.servers:
            server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> SentinelGroup:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def _pairs(row: list[str]) -> dict[str, str]:
    return dict(zip(row[::2], row[1::2], strict=True))
