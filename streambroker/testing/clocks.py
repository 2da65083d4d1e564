"""Processes whose clock is wrong, by libfaketime; what they measure with a monotonic clock stays right."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ..errors import ConfigurationError


def shifted(seconds: float) -> dict[str, str]:
    """Variables for the environment of a process whose clock is so much ahead, or behind. Raises ConfigurationError
    where the library, of the `dev` extra on Linux, is not installed."""
    spec = find_spec("libfaketime")
    library = Path(spec.origin or "").parent / "vendor/libfaketime/src/libfaketime.so.1" if spec else Path()
    if not library.is_file():
        raise ConfigurationError("no libfaketime for this machine: pip install libfaketime, on Linux")
    return {"LD_PRELOAD": str(library), "FAKETIME": f"{seconds:+.0f}", "DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "0"}
