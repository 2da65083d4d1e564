"""Options that all commands share: where the store is, how to talk to it, how to answer."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ..connection import connect
from ..engine import Engine, Inspector
from ..errors import AuthenticationError, StoreConnectionError, StoreUnavailable
from ..settings import JetStreamSettings
from .failures import FAILED, USAGE, CommandError, masked
from .output import plain

URL_VARIABLE = "STREAMBROKER_URL"
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_OPTION = "option:"


class _StoreOption(argparse.Action):
    """`--option name=value`, each under its own name, so that one before the command and one after it both count."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        name, equals, value = str(values).partition("=")
        if not equals or not name:
            parser.error(f"--option wants name=value, not {values!r}")
        setattr(namespace, _OPTION + name, _typed(parser, name, value))


def _typed(parser: argparse.ArgumentParser, name: str, text: str) -> Any:
    """The value as the settings want it: numbers are made of texts there, the rest here."""
    defaults = {alias: field.default for field in dataclasses.fields(JetStreamSettings)
                for alias in (field.name, *field.metadata["aliases"])}
    default, word = defaults.get(name), text.strip().lower()
    if isinstance(default, bool):
        if word not in _TRUE + _FALSE:
            parser.error(f"--option {name}: {text!r} is neither true nor false")
        return word in _TRUE
    if isinstance(default, tuple):
        return tuple(text.split(","))
    return None if word == "none" and not isinstance(default, str) else text


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """The same before and after the command's name; without defaults, so that neither hides the other."""
    group = parser.add_argument_group("store")
    group.add_argument("--url", default=argparse.SUPPRESS, metavar="URL",
                       help=f"where the messages are, as in broker_url; default: the variable {URL_VARIABLE}")
    group.add_argument("--prefix", default=argparse.SUPPRESS,
                       help="key prefix, when the application sets one (`prefix` or `global_keyprefix`)")
    group.add_argument("--option", action=_StoreOption, default=argparse.SUPPRESS, metavar="NAME=VALUE",
                       help="any other transport option; may be repeated")
    add_json_option(parser)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="answer as JSON")


def add_yes_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def wants_json(args: argparse.Namespace) -> bool:
    return bool(getattr(args, "json", False))


@contextlib.contextmanager
def open_engine(url: str, options: dict[str, Any] | None = None) -> Iterator[Engine]:
    """An engine that answers, closed afterwards. Raises CommandError when the store cannot be reached."""
    engine = connect(url, **(options or {}))
    try:
        try:
            engine.ping()
        except AuthenticationError as error:
            raise CommandError(f"{masked(url)} refuses the credentials: {_ended(error)} Check user and password in "
                               "--url.", FAILED) from error
        except StoreUnavailable as error:
            raise CommandError(f"{masked(url)} answers, but cannot be used: {_ended(error)}", FAILED) from error
        except StoreConnectionError as error:
            asks = "" if str(error).endswith("?") else " Is the server running, and are host, port and scheme right?"
            raise CommandError(f"{masked(url)} cannot be reached: {_ended(error)}{asks}", FAILED) from error
        yield engine
    finally:
        engine.close()


def _ended(error: Exception) -> str:
    """Its text as a sentence, whether or not it is one already."""
    text = str(error)
    return text if text.endswith((".", "?", "!")) else f"{text}."


@contextlib.contextmanager
def open_inspector(args: argparse.Namespace) -> Iterator[Inspector]:
    """The inspector of the store that the options name."""
    url = getattr(args, "url", None) or os.environ.get(URL_VARIABLE)
    if not url:
        raise CommandError("which store? Give --url redis-streams://HOST:PORT/DB or jetstream://HOST:PORT, or set "
                           f"{URL_VARIABLE}.", USAGE)
    options = {name[len(_OPTION):]: value for name, value in vars(args).items() if name.startswith(_OPTION)}
    if getattr(args, "prefix", None) is not None:
        options["prefix"] = args.prefix
    with open_engine(url, options) as engine:
        yield engine.inspector()


def known_queues(inspector: Inspector, names: Sequence[str] | None) -> list[str]:
    """`names`, each once, checked against the store; all queues for none. Raises CommandError for an unknown one."""
    known = inspector.queues()
    if not names:
        return known
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {plain(near[0])!r}?" if near else "`streambroker queues --all` lists what is there."
            raise CommandError(f"no queue {plain(name)!r} here (database, account and prefix count too); {hint}",
                               FAILED)
    return list(dict.fromkeys(names))
