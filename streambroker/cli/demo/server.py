"""The store of the demo: the servers that `--engine` offers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...embedded import EmbeddedNats, EmbeddedServer, EmbeddedValkey, answers_info, answers_ping
from ..failures import CommandError


class Kind(NamedTuple):
    """How one is made for a directory, how it keeps what it is given, whether one answers at a place."""

    make: Callable[[Path], EmbeddedServer]
    keeps: str
    answers: Callable[[tuple[str, int]], bool]


SERVERS = {"redis": Kind(EmbeddedValkey, "append-only file", answers_ping),
           "jetstream": Kind(EmbeddedNats, "JetStream on disk, each message synced", answers_info)}


def serve_on(engine: str, directory: Path, port: int) -> int:
    """Serve the data in `directory` from a process that outlives this one; its process id."""
    with (directory / "serve.log").open("ab") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "streambroker", "serve", engine, "--dir", str(directory), "--port", str(port)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        limit = time.monotonic() + 20
        while not SERVERS[engine].answers(("127.0.0.1", port)):
            if server.poll() is not None or time.monotonic() > limit:
                raise CommandError(f"the server did not stay up: look into {directory}/serve.log")
            time.sleep(0.05)
    except BaseException:
        server.terminate()
        server.wait()
        raise
    return server.pid
