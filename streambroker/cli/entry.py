"""`streambroker COMMAND ...`: the parser, and how every command ends."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import ConfigurationError, StreambrokerError
from . import dead, demo, queues, serve, waiting
from .failures import FAILED, INTERRUPTED, USAGE, CommandError, masked
from .options import URL_VARIABLE, add_store_options
from .parsing import Parser, examples

_EXAMPLES = f"""
    streambroker demo
    streambroker serve redis --port 6379
    streambroker queues --url redis-streams://localhost:6379/0
    streambroker queues --url jetstream://localhost:4222
    export {URL_VARIABLE}=redis-streams://localhost:6379/0
    streambroker dead ls --json
    streambroker dead replay -Q celery --yes
"""
_CODES = "exit codes: 0 done, 1 failed or not found, 2 wrong usage, 130 interrupted"


def build_parser() -> Parser:
    parser = Parser(prog="streambroker", description="Look into the queues of streambroker and steer them.",
                    epilog=examples(_EXAMPLES) + "\n\n" + _CODES)
    parser.add_argument("--version", action="version", version=f"streambroker {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log on stderr what happens")
    add_store_options(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (queues, dead, waiting, serve, demo):
        module.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code. Usage errors end in SystemExit(2), as argparse does it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.ERROR, stream=sys.stderr,
                        format="%(levelname)s %(name)s: %(message)s")
    try:
        code = _run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader went away (`| head`): nobody to tell, and nothing more to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code


def _run(args: argparse.Namespace) -> int:
    try:
        code: int = args.run(args)
    except CommandError as error:
        return _failed(str(error), error.code)
    except ConfigurationError as error:
        return _failed(str(error), USAGE)
    except StreambrokerError as error:
        return _failed(str(error), FAILED)
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)
    return code


def _failed(text: str, code: int) -> int:
    print(f"streambroker: {masked(text)}", file=sys.stderr)
    return code
