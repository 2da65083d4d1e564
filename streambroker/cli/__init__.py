"""The command line: a thin user of the Inspector. It knows no store and no framework."""

from __future__ import annotations

from .entry import main

__all__ = ["main"]
