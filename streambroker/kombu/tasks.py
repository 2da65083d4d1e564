"""What Celery's worker can take: it looks at a task's headers and arguments in many places, and ends at some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from kombu.exceptions import DecodeError

#: seconds, longest time limit of a task: timers of the pool take no more
_LONGEST = 1e9

_TEXT, _NUMBER = (str, type(None)), (int, type(None))
#: headers of a task that Celery's worker reads without a look at their type: it would end, or lose a place of its pool
_KINDS: Mapping[str, tuple[type, ...]] = {
    "task": (str,), "id": (str, int, UUID), "shadow": _TEXT, "root_id": (*_TEXT, int, UUID),
    "parent_id": (*_TEXT, int, UUID), "group": (*_TEXT, int, UUID), "group_index": _NUMBER, "retries": _NUMBER,
    "replaced_task_nesting": _NUMBER, "timelimit": (list, tuple, type(None)),
    "stamped_headers": (list, tuple, type(None)), "stamps": (dict, type(None))}


def is_task(headers: Mapping[str, Any]) -> bool:
    return "task" in headers and "id" in headers


def check_task(headers: dict[str, Any]) -> None:
    """Raises ValueError for a task that Celery's worker cannot take."""
    for name, kinds in _KINDS.items():
        if name in headers and not isinstance(headers[name], kinds):
            raise ValueError(f"header {name} cannot be {headers[name]!r:.80}")
    limits = headers.get("timelimit")
    if limits and (len(limits) != 2 or not all(map(_is_limit, limits))):
        raise ValueError(f"header timelimit cannot be {limits!r:.80}")
    if not all(isinstance(name, str) for name in headers.get("stamped_headers") or ()):
        raise ValueError(f"header stamped_headers cannot be {headers['stamped_headers']!r:.80}")


def _is_limit(value: Any) -> bool:
    return value is None or isinstance(value, (int, float)) and 0 <= value < _LONGEST


def check_payload(payload: Any) -> None:
    """Raises DecodeError for arguments that Celery's pool would fail at, after which the worker may fail at telling,
    and for callbacks that are none: each letter of a text would become a task."""
    if isinstance(payload, dict):
        return
    if not isinstance(payload, (list, tuple)) or len(payload) != 3 or not isinstance(payload[0], (list, tuple)) \
            or not isinstance(payload[1], dict) or not isinstance(payload[2], (dict, type(None))):
        raise DecodeError(f"a task's body is [args, kwargs, embed], not {payload!r:.80}")
    embed = payload[2] or {}
    for name in ("callbacks", "errbacks", "chain"):
        found = embed.get(name)
        if found and not (isinstance(found, (list, tuple)) and all(isinstance(each, (dict, str)) for each in found)):
            raise DecodeError(f"{name} of a task are a list of signatures, not {found!r:.80}")
    if not isinstance(embed.get("chord"), (dict, type(None))):
        raise DecodeError(f"the chord of a task is a signature, not {embed['chord']!r:.80}")
