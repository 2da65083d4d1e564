"""`serve`: the embedded server in the foreground."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from ..embedded import EmbeddedNats, EmbeddedServer, EmbeddedValkey
from .failures import FAILED, OK, CommandError
from .options import wants_json
from .output import print_json
from .parsing import Commands, add_command, add_group

_DIRECTORY = Path("streambroker-data")


def add(commands: Commands) -> None:
    serve = add_group(commands, "serve", "run an embedded server in the foreground, durably, on 127.0.0.1 only")
    valkey = add_command(serve, "redis", "run the embedded Valkey until Ctrl-C or SIGTERM", run_redis, """
        streambroker serve redis
        streambroker serve redis --port 0 --dir /var/lib/jobs --fsync always
        """, store=False)
    _add_options(valkey, port=6379, fsync="everysec")
    nats = add_command(serve, "jetstream", "run the embedded nats-server until Ctrl-C or SIGTERM", run_jetstream, """
        streambroker serve jetstream
        streambroker serve jetstream --port 0 --dir /var/lib/jobs
        """, store=False)
    _add_options(nats, port=4222, fsync="always")


def _add_options(command: argparse.ArgumentParser, *, port: int, fsync: str) -> None:
    command.add_argument("--port", type=_port, default=port, help=f"0 takes a free one; default: {port}")
    command.add_argument("--dir", type=Path, default=_DIRECTORY, metavar="DIRECTORY",
                         help=f"where the data stays, made when missing; default: ./{_DIRECTORY}")
    command.add_argument("--fsync", choices=("everysec", "always"), default=fsync,
                         help="when data reaches the disk: a crash of the machine (not of the server) costs at most "
                              f"the last second, or nothing; default: {fsync}")


def run_redis(args: argparse.Namespace) -> int:
    return _serve(args, EmbeddedValkey)


def run_jetstream(args: argparse.Namespace) -> int:
    return _serve(args, EmbeddedNats)


def _serve(args: argparse.Namespace, kind: type[EmbeddedValkey] | type[EmbeddedNats]) -> int:
    def announce(server: EmbeddedServer) -> None:
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
    server = kind(args.dir, port=args.port, fsync=args.fsync)
    return FAILED if server.serve_forever(announce) else OK


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CommandError(f"{directory} cannot hold the data: {error.strerror}. Choose another with --dir.") from error


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 0 to 65535")
    return int(text)
