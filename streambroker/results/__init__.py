"""Results of jobs on NATS JetStream, for any framework: values by key, sets of values, waiting without polling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .store import Conflict, ResultStore, Stored
    from .watch import Watch

__all__ = ["Conflict", "ResultStore", "Stored", "Watch"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(".watch" if name == "Watch" else ".store", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
