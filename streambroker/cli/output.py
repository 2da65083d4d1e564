"""What people and programs read: tables, JSON, ages, a progress bar, a question."""

from __future__ import annotations

import datetime
import json
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from .failures import FAILED, USAGE, CommandError

_BAR = 30
_REDRAW = 0.1


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def plain(text: str) -> str:
    """`text` on one line and harmless to a terminal: control characters are shown as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def age(seconds: float | None) -> str:
    """A time span as people say it; `-` for none."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def moment(posix: float) -> str:
    """A POSIX time as local date and time."""
    try:
        return datetime.datetime.fromtimestamp(posix).astimezone().isoformat(sep=" ", timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return f"{posix:.0f}"


def print_table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Numbers to the right, texts to the left; on a terminal the last column is cut at its edge."""
    body = [[cell if isinstance(cell, int) else plain(str(cell)) for cell in row] for row in rows]
    widths = [max(len(title), *(len(str(row[i])) for row in body)) if body else len(title)
              for i, title in enumerate(titles)]
    edge = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in (titles, *body):
        cells = [str(cell).rjust(width) if _number(body, i) else str(cell).ljust(width)
                 for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        line = "  ".join(cells).rstrip()
        print(line if edge is None or len(line) <= edge else line[:edge - 3] + "...")


def confirm(question: str, *, yes: bool) -> None:
    """Returns when the user agrees. Asks on a terminal; without one only `--yes` is an agreement."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandError(f"{question} Repeat the command with --yes: there is no terminal to ask on.", USAGE)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("left as it is", FAILED)


class Progress:
    """A bar on stderr while a long command works; nothing when stderr is no terminal."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._shown = 0.0
        self._visible = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._visible and self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if self._visible and now - self._shown >= _REDRAW:
            self._shown = now
            filled = _BAR * min(self._done, self._total) // max(self._total, 1)
            bar = "#" * filled + "." * (_BAR - filled)
            print(f"\r\x1b[K{self._what} [{bar}] {self._done}/{self._total}", end="", file=sys.stderr, flush=True)


def _number(body: Sequence[Sequence[Any]], column: int) -> bool:
    return bool(body) and all(isinstance(row[column], int) for row in body)

