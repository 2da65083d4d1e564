"""Dramatiq's own tests from its source distribution against our brokers.

    python -m integration.upstream.run_dramatiq --harness FOLDER
    python -m integration.upstream.run_dramatiq --harness FOLDER --server nats --gevent --classes core,counts

FOLDER has the conformance harness: its `run.py` lays the tests in a temporary folder, with fixtures that make the
broker under test. Exit status 1 when anything failed: there is no list of known failures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import nats

from integration.upstream.suite import ROOT
from streambroker.embedded import free_port
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import RedisServer


def download(folder: Path) -> Path:
    """The source distribution of the installed version."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:",
                    "--dest", str(folder), f"dramatiq=={version('dramatiq')}"], check=True, stdin=subprocess.DEVNULL)
    (archive,) = folder.glob("dramatiq-*.tar.gz")
    return archive


def reset_nats(port: int) -> None:
    """Remove every stream; the harness calls it between tests."""
    async def reset() -> None:
        connection = await nats.connect(f"nats://127.0.0.1:{port}")
        try:
            jetstream = connection.jetstream()
            for stream in await jetstream.streams_info():
                await jetstream.delete_stream(stream.config.name)
        finally:
            await connection.close()

    asyncio.run(reset())


def specs(server: RedisServer | NatsServer) -> dict[str, str]:
    """The harness's options for a server, `{port}` being that of a proxy."""
    if isinstance(server, NatsServer):
        kind, scheme = "JetStreamBroker", "nats"
        reset = f"integration.upstream.run_dramatiq:reset_nats({server.port})"
    else:
        kind, scheme = "RedisStreamsBroker", "redis"
        reset = f"redis:Redis(port={server.port}).flushall()"

    def broker(port: int | str, more: str = "") -> str:
        return f'streambroker.dramatiq:{kind}(url="{scheme}://127.0.0.1:{port}"{more})'

    found = {"broker": broker(server.port), "reset": reset, "dead-broker": broker(free_port()),
             "short-lease-broker": broker(server.port, ", visibility_timeout=2000"),
             "proxied-broker": broker("{port}"), "server-port": str(server.port)}
    for name, module in (("result-backend", "results"), ("rate-limiter-backend", "rate_limits")):
        if isinstance(server, RedisServer):
            found[name] = f"dramatiq.{module}.backends.redis:RedisBackend(port={server.port})"
        else:
            found[name] = f'streambroker.dramatiq.{module}:JetStreamBackend(url="nats://127.0.0.1:{server.port}")'
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--server", default="valkey", metavar="KIND", help="valkey, redis62, ... or nats, nats210, ...")
    parser.add_argument("--classes", default="core,counts,results,ratelimit,cli,own")
    parser.add_argument("--gevent", action="store_true", help="patch everything in every process")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    chosen = parser.parse_args()
    server: RedisServer | NatsServer = (
        NatsServer(chosen.server, max_payload=8 << 20) if chosen.server.startswith("nats")
        else RedisServer(chosen.server))
    with server, TemporaryDirectory(prefix="upstream-") as place:
        options = [word for name, value in specs(server).items() for word in (f"--{name}", value)]
        command = [sys.executable, str(chosen.harness / "run.py"), "--tests", str(download(Path(place))),
                   "--classes", chosen.classes, *options, *(["--gevent"] if chosen.gevent else []), "--",
                   *chosen.pytest]
        modules = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": modules}, stdin=subprocess.DEVNULL,
                              check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
