"""What goes over a link, and how it looks on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ...errors import ConfigurationError, MessageTooLarge

_LINE = b"NATS/1.0"
#: requests of one thread that are in flight at once, and their bytes
_WINDOW, _WINDOW_BYTES = 500, 4 * 1024 * 1024


class Frame(NamedTuple):
    """A message to publish. `reply` is where answers go."""

    subject: str
    data: bytes = b""
    reply: str = ""
    headers: Mapping[str, str] | None = None


class Reply(NamedTuple):
    """A message that came. `status` is 0 for a plain one, else the number in its first line: 100 (heartbeat), 404, 408,
    409, 503 (nobody answers there); 403 is ours: the server refused the request's subject. The text that came with it
    is in `headers["Description"]`."""

    subject: str
    data: bytes
    reply: str = ""
    status: int = 0
    headers: Mapping[str, str] | None = None

    @property
    def description(self) -> str:
        return (self.headers or {}).get("Description", "")


def header_block(headers: Mapping[str, str]) -> bytes:
    """Headers as they go over the wire. Raises ConfigurationError for a line break in one."""
    lines = ["NATS/1.0"]
    for name, value in headers.items():
        if "\n" in value or "\r" in value or not _is_header(name):
            raise ConfigurationError(f"header {name!r} cannot be sent: no colon or space in its name, no line break")
        lines.append(f"{name}: {value}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@lru_cache(1024)
def _is_header(name: str) -> bool:
    return ":" not in name and name.split() == [name]


def encode(frame: Frame, limit: int, reply: str = "") -> bytes:
    """The command that publishes it; `reply` in place of its own. Raises MessageTooLarge when its headers and data are
    over `limit` bytes: the server would close the connection. Raises ConfigurationError for a subject with a space or
    line break."""
    subject, data, given, headers = frame
    _check_subject(subject)
    if given:
        _check_subject(given)
    reply = reply or given
    if not headers:
        size = len(data)
        head = f"PUB {subject} {reply} {size}\r\n".encode()
    else:
        block = header_block(headers)
        size = len(block) + len(data)
        head = f"HPUB {subject} {reply} {len(block)} {size}\r\n".encode() + block
    _check(size, limit)
    return b"".join((head, data, b"\r\n"))


def windows(frames: Sequence[Frame], limit: int) -> list[Sequence[Frame]]:
    """Parts of `frames` to have in flight one after the other, bounded in number and bytes. Raises MessageTooLarge as
    `encode` does, for any of them, when there are several."""
    found: list[Sequence[Frame]] = []
    start = size = 0
    for index, frame in enumerate(frames):
        if index > start and (index - start >= _WINDOW or size + len(frame.data) > _WINDOW_BYTES):
            found.append(frames[start:index])
            start, size = index, 0
        size += len(frame.data)
    if not start:
        return [frames] if frames else []
    for frame in frames:
        _check(len(frame.data) + (len(header_block(frame.headers)) if frame.headers else 0), limit)
    return [*found, frames[start:]]


@lru_cache(4096)
def _check_subject(subject: str) -> None:
    if subject.split() != [subject] or not subject.isprintable():
        raise ConfigurationError(f"{subject!r} is no subject: it is empty, or a space or a line break is in it")


def _check(size: int, limit: int) -> None:
    if size > limit:
        raise MessageTooLarge(f"the message has {size} bytes, the server takes {limit} (its max_payload); nothing was "
                              "sent")


def read_headers(block: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers of a header block."""
    first, _, rest = block.partition(b"\r\n")
    headers: dict[str, str] = {}
    status = 0
    if len(first) > len(_LINE):
        number, _, text = first[len(_LINE):].decode(errors="replace").strip().partition(" ")
        status = int(number) if number.isdigit() else 0
        if text:
            headers["Description"] = text
    for line in rest.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if colon:
            headers[name.decode(errors="replace")] = value.strip().decode(errors="replace")
    return status, headers


class AckPlace(NamedTuple):
    """What the subject that acknowledges a message tells of it. `raw` counts its deliveries, `time` is the POSIX time
    of its entry."""

    raw: int
    sequence: int
    time: float
    stream: str


def read_place(reply: Reply) -> AckPlace | None:
    """None when it did not come from a consumer of the server."""
    # $JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>, or with domain and account
    # hash before and a random token behind
    parts = reply.reply.split(".")
    first = 4 if len(parts) == 9 else 6
    try:
        return AckPlace(int(parts[first]), int(parts[first + 1]), int(parts[first + 3]) / 1e9,
                        parts[first - 2])
    except (ValueError, IndexError):
        return None


def read_reply(subject: bytes, reply: bytes, data: bytes, block: bytes | None) -> Reply:
    # other programs may use any bytes
    names = subject.decode(errors="replace"), reply.decode(errors="replace")
    if not block:
        return Reply(names[0], data, names[1])
    return Reply(names[0], data, names[1], *read_headers(block))
