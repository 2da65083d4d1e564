"""Where the primary is, as sentinels tell: their addresses, their logins, and one question to one of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from ...errors import AuthenticationError, ConfigurationError, StoreConnectionError, StoreError
from ...settings import SentinelSettings, Settings, read_settings
from .client import CLIENT_OPTIONS, Address, dialer
from .link import Link, is_about_certificates, translate
from .resp import ReplyError, pack, text_of

SCHEME = "sentinel-streams"
#: with TLS to everybody
TLS_SCHEME = f"{SCHEME}+rediss"
PORT = 26379
#: longest wait for each step of a link to a sentinel, unless `sentinel_kwargs` has another `socket_timeout`
PATIENCE = 1.0
#: what `sentinel_kwargs` may hold
_LOGIN = (CLIENT_OPTIONS - {"host", "port", "db", "path", "client", "startup_nodes"}
          | {"socket_timeout", "socket_connect_timeout"})
#: what it may hold without effect: asking is done by the engine
_IDLE = frozenset({"db", "decode_responses", "encoding", "encoding_errors", "health_check_interval", "max_connections",
                   "protocol", "retry", "retry_on_error", "retry_on_timeout", "socket_keepalive"})

Place = tuple[str, int]


def told(place: Place) -> str:
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class SentinelAddress(Address):
    """Of a primary that has no address of its own. `sentinels` in the order given; login, database and TLS are those of
    the primary, the sentinels' own are in `sentinel_kwargs`. Where the scheme asks for TLS the sentinels have the
    primary's, unless that says otherwise."""

    def __init__(self, sentinels: tuple[Place, ...], settings: SentinelSettings, plain: str,
                 options: Mapping[str, Any], sentinel_kwargs: Any) -> None:
        super().__init__(plain, options)
        everywhere = plain.startswith("rediss")
        self._scheme = TLS_SCHEME if everywhere else SCHEME
        if not everywhere:
            _encrypted(options, f"give ssl=True, for the primary, or write {TLS_SCHEME}://, for the sentinels too")
        self.sentinels = sentinels
        self.name = settings.master_name
        self.min_others = settings.min_other_sentinels
        shared = {name: value for name, value in options.items() if name.startswith("ssl") and value is not None}
        self.sentinel_kwargs = {**({**shared, "ssl": self.tls} if everywhere else {}), **_checked(sentinel_kwargs)}
        _encrypted(self.sentinel_kwargs, "give sentinel_kwargs={'ssl': True, ...}")

    def __str__(self) -> str:
        return f"{self._scheme}://{','.join(map(told, self.sentinels))}/{self.database} master {self.name}"

    __repr__ = __str__


def read_sentinel(url: str, options: Mapping[str, Any]) -> tuple[SentinelAddress, SentinelSettings]:
    """From `sentinel-streams://[user:password@]host[:port],host:port.../database`, where a semicolon and the scheme
    again may stand in place of a comma, and options, which may be in its query too. Raises ConfigurationError."""
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    known = {**dict(parse_qsl(query)), **{name: value for name, value in options.items() if value is not None}}
    places: list[Place] = []
    login = database = ""
    for part in re.split(rf"(?i)[;,](?:{SCHEME}(?:\+rediss)?://)?", rest):
        netloc, _, path = part.partition("/")
        head, _, place = netloc.rpartition("@")
        login, database = login or head, database or path.strip("/")
        if place:
            places.append(_place(place))
    places += [_place(each) for each in _listed(known.pop("sentinels", ()))]
    kwargs = known.pop("sentinel_kwargs", None) or {}
    client = {name: value for name, value in known.items() if name in CLIENT_OPTIONS}
    if wrong := {"client", "host", "port", "path", "startup_nodes"} & client.keys():
        raise ConfigurationError(f"option {wrong.pop()}: {SCHEME}:// finds the primary by itself; list the sentinels "
                                 "in the URL and give master_name")
    settings = read_settings({name: value for name, value in known.items() if name not in client}, SentinelSettings)
    if not settings.master_name:
        raise ConfigurationError(f"{SCHEME}:// needs the option master_name: the name in the sentinels' "
                                 "`sentinel monitor` line")
    start = "rediss-streams" if scheme.lower() == TLS_SCHEME else "redis-streams"
    plain = f"{start}://{login}{'@' if login else ''}primary/{database}"
    address = SentinelAddress(tuple(dict.fromkeys(places)) or (("localhost", PORT),), settings, plain, client, kwargs)
    return address, settings


def _listed(given: Any) -> Iterable[Any]:
    return re.split("[;,]", given) if isinstance(given, str) else given


def _place(given: Any) -> Place:
    """Of `host:port`, `host` or (host, port)."""
    try:
        if isinstance(given, (tuple, list)):
            host, port = given
            return str(host), int(port)
        parts = urlsplit("//" + str(given).partition("://")[2] if "://" in str(given) else "//" + str(given).strip())
        if not parts.hostname:
            raise ValueError("no host")
        return parts.hostname, parts.port or PORT
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"a sentinel is written host:port, not {given!r}") from error


def _checked(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        # from a URL or the command line
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigurationError("option sentinel_kwargs: as a text it is JSON such as {\"password\": ...}"
                                     ) from error
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"option sentinel_kwargs is a dict such as {{'password': ...}}, not a "
                                 f"{type(given).__name__}")
    for name in given:
        if name not in _LOGIN | _IDLE:
            raise ConfigurationError(f"option sentinel_kwargs: unknown name {name!r}; known: "
                                     f"{', '.join(sorted(_LOGIN))}")
    return {name: value for name, value in given.items() if name in _LOGIN and value is not None}


def _encrypted(options: Mapping[str, Any], remedy: str) -> None:
    """Nobody who names a certificate means a plain link."""
    named = [name for name, value in options.items() if name.startswith("ssl_") and value is not None]
    if named and options.get("ssl") is None:
        raise ConfigurationError(f"option {named[0]} without TLS: {remedy}")


class Answer(NamedTuple):
    """The primary, and in which configuration epoch: each failover raises it, so a lower one is out of date."""

    epoch: int
    primary: Place


class Sentinels:
    """How to reach them and what to ask. Thread-safe: each question has a link of its own."""

    def __init__(self, address: SentinelAddress, settings: Settings) -> None:
        self._address = address
        options = dict(address.sentinel_kwargs)
        self._timeout = float(options.pop("socket_timeout", PATIENCE))
        self._connect_timeout = float(options.pop("socket_connect_timeout", self._timeout))
        self._dial = dialer(Address("redis-streams://sentinel", options), settings)

    def link(self, place: Place) -> Link:
        host, port = place
        return Link(lambda timeout: self._dial(timeout, host=host, port=port, socket_connect_timeout=min(
            timeout, self._connect_timeout)), self._timeout)

    def ask(self, place: Place) -> Answer:
        """Raises StoreConnectionError, StoreError; their text names the sentinel and says what to do."""
        link, name = self.link(place), self._address.name
        try:
            link.open()
            link.send(pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name) + pack("SENTINEL", "MASTER", name))
            found, state = link.read(), link.read()
            if found is None:
                raise StoreError(self._unknown(link.call("SENTINEL", "MASTERS")))
        except AuthenticationError as error:
            if is_about_certificates(error):
                raise AuthenticationError(f"sentinel {told(place)}: {error}; the sentinels' own are given in "
                                          "sentinel_kwargs={'ssl': True, 'ssl_ca_certs': ...}") from error
            raise AuthenticationError(f"sentinel {told(place)} refuses the login: {error}; the sentinels' own is given "
                                      "in sentinel_kwargs={'username': ..., 'password': ...}") from error
        except StoreConnectionError as error:
            raise StoreConnectionError(f"sentinel {told(place)}: {error}") from error
        finally:
            link.close()
        for reply in (found, state):
            if isinstance(reply, ReplyError):
                raise StoreError(f"sentinel {told(place)}: {translate(reply)}")
        facts = dict(zip(map(text_of, state[::2]), map(text_of, state[1::2]), strict=True))
        others = int(facts["num-other-sentinels"])
        if others < self._address.min_others:
            raise StoreConnectionError(f"sentinel {told(place)} sees {others} other sentinels, fewer than "
                                       f"min_other_sentinels={self._address.min_others}")
        return Answer(int(facts["config-epoch"]), (text_of(found[0]), int(found[1])))

    def _unknown(self, rows: list[list[bytes]]) -> str:
        names = ", ".join(repr(text_of(row[row.index(b"name") + 1])) for row in rows)
        return (f"the sentinels know no primary {self._address.name!r}, but {names or 'none at all'}: set master_name "
                "to the name in their `sentinel monitor` line")
