"""What the demo shows while it runs: milestones, and one line that is kept up to date."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from typing import TextIO

_REDRAW = 0.2
_LINES = 2.0


@dataclass(frozen=True, slots=True)
class Now:
    """Counts of this moment. `held` is what the killed worker had, `recovered` how much of it is no longer its."""

    published: int
    done: int
    queued: int
    running: int
    delayed: int
    held: int
    recovered: int

    def __str__(self) -> str:
        recovered = f"  recovered {self.recovered}/{self.held}" if self.held else ""
        return (f"published {self.published}  queued {self.queued}  running {self.running}  "
                f"delayed {self.delayed}{recovered}  done {self.done}")


class Screen:
    """One refreshed line on a terminal, a line every two seconds elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._terminal = self._stream.isatty()
        self._began = time.monotonic()
        self._last = 0.0

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        self._write(f"{self.seconds:4.0f}s {text}\n")

    def show(self, now: Now) -> None:
        moment = time.monotonic()
        if moment - self._last < (_REDRAW if self._terminal else _LINES):
            return
        self._last = moment
        line = f"{self.seconds:4.0f}s {now}"
        # a line that wraps could not be refreshed
        self._write(line[:shutil.get_terminal_size().columns - 1] if self._terminal else line + "\n")

    def close(self) -> None:
        """Remove the refreshed line."""
        self._write("")

    def _write(self, text: str) -> None:
        self._stream.write(("\r\x1b[K" if self._terminal else "") + text)
        self._stream.flush()
