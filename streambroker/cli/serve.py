"""`serve`: the embedded server in the foreground."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from ..embedded import EmbeddedValkey
from .failures import FAILED, OK, CommandError
from .options import wants_json
from .output import print_json
from .parsing import Commands, add_command, add_group

_PORT = 6379
_DIRECTORY = Path("streambroker-data")


def add(commands: Commands) -> None:
    serve = add_group(commands, "serve", "run an embedded server in the foreground, durably, on 127.0.0.1 only")
    valkey = add_command(serve, "redis", "run the embedded Valkey until Ctrl-C or SIGTERM", run_redis, """
        streambroker serve redis
        streambroker serve redis --port 0 --dir /var/lib/jobs --fsync always
        """, store=False)
    valkey.add_argument("--port", type=port, default=_PORT, help=f"0 takes a free one; default: {_PORT}")
    valkey.add_argument("--dir", type=Path, default=_DIRECTORY, metavar="DIRECTORY",
                       help=f"where the data stays, made when missing; default: ./{_DIRECTORY}")
    valkey.add_argument("--fsync", choices=("everysec", "always"), default="everysec",
                       help="when data reaches the disk: a crash of the machine (not of the server) costs at most the "
                            "last second, or nothing; default: everysec")


def run_redis(args: argparse.Namespace) -> int:
    def announce(server: EmbeddedValkey) -> None:
        if wants_json(args):
            print_json({"url": server.url, "result_url": server.result_url, "directory": str(server.directory),
                        "pid": server.process.pid})
        else:
            print(f"serving {server.url}\n"
                  f"  broker_url = {server.url!r}\n"
                  f"  result_backend = {server.result_url!r}\n"
                  f"  data in {server.directory}, fsync {args.fsync}; Ctrl-C ends it")
        sys.stdout.flush()

    _make(args.dir)
    server = EmbeddedValkey(args.dir, port=args.port, fsync=args.fsync)
    return FAILED if server.serve_forever(announce) else OK


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CommandError(f"{directory} cannot hold the data: {error.strerror}. Choose another with --dir.") from error


def port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:
        raise ValueError("no port")
    return number
