"""The parser's building blocks: one way to add a command, its help with examples, its errors without secrets."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from .failures import USAGE, masked
from .options import add_json_option, add_store_options

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = object

Run = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """argparse, with URLs in its errors masked and no abbreviated options."""

    def __init__(self, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {masked(message)}\n")


def examples(text: str) -> str:
    return "examples:\n" + textwrap.indent(textwrap.dedent(text).strip("\n"), "  ")


def add_command(commands: Commands, name: str, summary: str, run: Run, shown: str, *, store: bool = True) -> Parser:
    """A command with its help; `store`: it looks into one."""
    parser: Parser = commands.add_parser(  # type: ignore[assignment]
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=examples(shown))
    parser.set_defaults(run=run)
    if store:
        add_store_options(parser)
    else:
        add_json_option(parser)
    return parser


def add_group(commands: Commands, name: str, summary: str) -> Commands:
    """A command that only has commands."""
    parser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
