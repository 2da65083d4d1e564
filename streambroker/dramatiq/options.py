"""Options of the brokers: Dramatiq's names and milliseconds outside, the engine's names and seconds inside."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigurationError
from ..settings import Settings

logger = logging.getLogger(__name__)

#: options of Dramatiq's own brokers, and the nearest of ours
STOCK: Mapping[str, str] = {
    "namespace": "prefix",
    "heartbeat_timeout": "visibility_timeout",
    "dead_message_ttl": "dead_letter_max_age",
}
#: those that have no meaning here, and why
IGNORED: Mapping[str, str] = {
    "maintenance_chance": "recovery follows the lease, not chance",
}
#: options that are replaced, and by what
REPLACED: Mapping[str, str] = {
    "priority_steps": "max_priority",
    "priority_order": "max_priority",
}
#: options of the connection keep the client's unit
_SECONDS = frozenset({"socket_timeout", "socket_connect_timeout"})
#: Dramatiq's variable for how long dead letters are kept (ms)
DEAD_MESSAGE_TTL = "dramatiq_dead_message_ttl"
#: most levels above the ordinary one: each is looked at with every request
MOST_PRIORITY = 31
#: steps that tools look at without being told
USUAL_STEPS = 4


def engine_options(given: Mapping[str, Any], kind: type[Settings], max_priority: int | None) -> dict[str, Any]:
    """Options for `streambroker.connect`. Raises ConfigurationError."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    options: dict[str, Any] = {}
    if os.environ.get(DEAD_MESSAGE_TTL) and not {"dead_message_ttl", "dead_letter_max_age"} & given.keys():
        given = {**given, "dead_message_ttl": os.environ[DEAD_MESSAGE_TTL]}
    for name, value in given.items():
        if name in IGNORED:
            logger.info("option %s has no effect: %s", name, IGNORED[name])
            continue
        if name in REPLACED:
            raise ConfigurationError(f"option {name} is not for Dramatiq: use {REPLACED[name]}")
        ours = STOCK.get(name, name)
        if ours in options:
            raise ConfigurationError(f"options {name} and {ours} mean the same: leave one of them out")
        if ours != name:
            logger.info("option %s is taken as %s", name, ours)
        field = fields.get(ours)
        in_ms = field is not None and field.metadata["unit"] == "s" and ours not in _SECONDS
        options[ours] = _seconds(name, value, field) if in_ms and field is not None and value is not None else value
    if max_priority is not None:
        if isinstance(max_priority, bool) or not isinstance(max_priority, int) or not 0 < max_priority <= MOST_PRIORITY:
            raise ConfigurationError(f"option max_priority: {max_priority!r} cannot be used, it is a number from 1 to "
                                     f"{MOST_PRIORITY}")
        options["priority_steps"] = tuple(range(max(USUAL_STEPS, max_priority + 1)))
    return options


def _seconds(name: str, value: Any, field: dataclasses.Field[Any]) -> float:
    low, high = field.metadata["low"], field.metadata["high"]
    try:
        if isinstance(value, bool):
            raise ValueError("not a number")
        seconds = float(value) / 1000
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"option {name}: {value!r} cannot be used ({error})") from error
    if not (low is None or seconds >= low) or not (high is None or seconds <= high):
        bounds = f"at least {low * 1000:g}" if high is None else f"{(low or 0) * 1000:g} to {high * 1000:g}"
        raise ConfigurationError(f"option {name}: {value!r} is out of bounds ({bounds} ms)")
    return seconds
