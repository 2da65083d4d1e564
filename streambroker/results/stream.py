"""The stream of results: its subjects, its settings, and reading from it.

| subject | what |
| --- | --- |
| `<p>.r.<key>` | the value of a key, in the stream `<p>_results` |
| `<p>.c.<set>.<member>` | a member of a set, in the same stream |
| `<p>.a.<key>` | tells of a new value: the server sends it on when it is stored; in no stream |

Every subject keeps its last message alone. A waiter listens to what the server sends on, not to the publishers: those
are heard also when the server refuses what they say, and before it is stored.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engines.jetstream.api import STREAM_NOT_FOUND, Api, ApiError
from ..engines.jetstream.frames import Frame, Reply, read_headers
from ..engines.jetstream.names import token
from ..engines.jetstream.streams import MESSAGE_TTL, NANO
from ..errors import StoreConnectionError, StoreError, StoreUnavailable

if TYPE_CHECKING:
    from ..settings import JetStreamSettings

logger = logging.getLogger(__name__)

MESSAGE_ID = "Nats-Msg-Id"
#: what is looked at in the stream that is there, and mended
_MENDED = ("max_age", "allow_msg_ttl", "republish", "duplicate_window")
#: an offset behind every subject: the answer counts and lists none
_BEHIND_ALL = 1_000_000_000


class Stored(NamedTuple):
    """A value, its place in the stream, which grows with each put, and the id of the put."""

    value: bytes
    sequence: int
    put: str = ""


class ResultStream:
    """Knows what the server's stream is like. `aensure` is for the link's thread, the rest for any."""

    def __init__(self, api: Api, settings: JetStreamSettings, max_age: float) -> None:
        self._api = api
        self._settings = settings
        self.max_age = max_age
        self._root = token(settings.prefix)
        self.name = f"{self._root}_results"
        self.known = False
        #: whether a message may have a time of its own
        self.has_ttl = False
        self._direct = False

    def value(self, key: str) -> str:
        return f"{self._root}.r.{token(key)}"

    def news(self, key: str) -> str:
        return f"{self._root}.a.{token(key)}"

    def member(self, name: str, member: str) -> str:
        return f"{self._root}.c.{token(name)}.{token(member)}"

    def members(self, name: str) -> str:
        return f"{self._root}.c.{token(name)}.*"

    def forget(self) -> None:
        """It may be gone."""
        self.known = False

    def allow(self, life: float) -> None:
        """A value shall live so many seconds, 0: for ever."""
        if self.max_age and not 0 < life <= self.max_age:
            self.max_age = life
            self.known = False

    async def aensure(self) -> None:
        """Make it or mend it, unless it is known to be right. Raises StoreConnectionError, StoreError."""
        if self.known:
            return
        age = self.max_age
        level = int((await self._api.acall("INFO")).get("api", {}).get("level", 0))
        wanted = self._config(level)
        try:
            answer = await self._api.acall(f"STREAM.CREATE.{self.name}", wanted)
        except StoreError as error:
            # it is there and another, or this user may not make it
            try:
                answer = await self._mend(wanted, level)
            except StoreError:
                raise error from None
        config = answer["config"]
        self.has_ttl = bool(config.get("allow_msg_ttl"))
        # with copies any of them answers, also one that is late
        self._direct = bool(config.get("allow_direct")) and int(config.get("num_replicas", 1)) == 1
        self.known = age == self.max_age

    async def _mend(self, wanted: Mapping[str, Any], level: int) -> dict[str, Any]:
        answer = await self._api.acall(f"STREAM.INFO.{self.name}")
        config = answer["config"]
        changed = {**config, **{name: wanted[name] for name in _MENDED if name in wanted}}
        if level >= MESSAGE_TTL:
            # each value has its own time, so another application's longer age harms nobody
            ages = config.get("max_age", 0), wanted["max_age"]
            changed["max_age"] = 0 if 0 in ages else max(ages)
        if all(config.get(name) == changed.get(name) for name in _MENDED):
            return answer
        try:
            return await self._api.acall(f"STREAM.UPDATE.{self.name}", changed)
        except StoreError as error:
            logger.warning("the stream %s is not as its options ask for and cannot be changed: %s", self.name, error)
            return answer

    def _config(self, level: int) -> dict[str, Any]:
        settings, root = self._settings, self._root
        age = int(self.max_age * NANO)
        window = int(settings.duplicate_window * NANO)
        config: dict[str, Any] = {
            "name": self.name, "subjects": [f"{root}.r.*", f"{root}.c.*.*"], "retention": "limits",
            "storage": settings.storage, "discard": "old", "max_consumers": -1, "max_msgs": -1, "max_bytes": -1,
            "max_age": age, "max_msgs_per_subject": 1, "num_replicas": settings.replicas,
            "duplicate_window": min(window, age) if age else window, "allow_direct": True,
            "republish": {"src": f"{root}.r.*", "dest": f"{root}.a.{{{{wildcard(1)}}}}"}}
        if level >= MESSAGE_TTL:
            config["allow_msg_ttl"] = True
        return config

    # Requests and what their answers say

    def get(self, subject: str) -> Frame:
        """Asks for the last message of a subject; `read` reads the answer."""
        if self._direct:
            return Frame(f"{self._api.prefix}.DIRECT.GET.{self.name}.{subject}")
        return self._api.frame(f"STREAM.MSG.GET.{self.name}", {"last_by_subj": subject})

    def count(self, filtered: str) -> Frame:
        """Asks how many subjects have a message; `total` in the answer."""
        return self._api.frame(f"STREAM.INFO.{self.name}", {"subjects_filter": filtered, "offset": _BEHIND_ALL})

    def subjects(self, filtered: str, offset: int) -> Frame:
        """Asks which subjects have a message, from the offset-th on."""
        return self._api.frame(f"STREAM.INFO.{self.name}", {"subjects_filter": filtered, "offset": offset})

    def purge(self, filtered: str) -> Frame:
        return self._api.frame(f"STREAM.PURGE.{self.name}", {"filter": filtered})

    def read(self, reply: Reply | None) -> Stored | None:
        """What an answer to `get` says; None: nothing is there. Raises as `check`."""
        if reply is not None and reply.status == 404:
            return None
        if reply is not None and not reply.status and reply.headers and "Nats-Sequence" in reply.headers:
            return stored(reply)
        try:
            message = self.check("reading a result", reply)["message"]
        except ApiError as error:
            if error.missing:
                return None
            raise
        headers: Mapping[str, str] = {}
        if message.get("hdrs"):
            headers = read_headers(base64.b64decode(message["hdrs"]))[1]
        return Stored(base64.b64decode(message.get("data") or ""), int(message["seq"]), headers.get(MESSAGE_ID, ""))

    @staticmethod
    def check(request: str, reply: Reply | None) -> dict[str, Any]:
        """An answer of JSON. Raises ApiError for one that refuses, StoreUnavailable for one that means "not now",
        StoreConnectionError when there is none."""
        if reply is None:
            raise StoreConnectionError(f"{request}: no answer in time, or the link broke")
        try:
            return Api.read(request, reply)
        except ApiError as error:
            if error.code == STREAM_NOT_FOUND:
                raise StoreUnavailable(f"{request}: the stream is gone") from error
            raise


def stored(reply: Reply) -> Stored:
    """A message of the stream with the headers that the server adds."""
    headers = reply.headers or {}
    return Stored(reply.data, int(headers.get("Nats-Sequence", 0)), headers.get(MESSAGE_ID, ""))
