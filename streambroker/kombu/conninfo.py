"""From a `kombu.Connection` to the URL and options of an engine, and the options of this adapter."""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlsplit

from ..errors import ConfigurationError
from ..settings import IGNORED, JetStreamSettings, SentinelSettings, Settings

if TYPE_CHECKING:
    from kombu import Connection

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KombuOptions:
    """Transport options of this adapter alone. Times are seconds."""

    deadletter_queue: str | None = dataclasses.field(default=None, metadata={"meaning": (
        "Queue that takes what was published to an exchange and had no queue to go to. None: a warning.")})
    revoke_waiting: bool = dataclasses.field(default=True, metadata={"meaning": (
        "Revoking a task whose countdown still runs removes it from the store, so that no worker has to remember it.")})
    auto_delete_expires: float = dataclasses.field(default=600.0, metadata={"unit": "s", "meaning": (
        "How long a queue that is deleted with its last consumer outlives a consumer that died.")})


#: names that Kombu and Celery themselves put among the transport options, or that other transports know
_KOMBU_OWN = frozenset({
    "max_retries", "interval_start", "interval_step", "interval_max", "connect_retries_timeout", "errback", "callback",
    "retry_errors", "retry_policy", "on_revive", "confirm_publish", "read_timeout", "write_timeout", "login_method"})

#: options that the client of Redis understands and that are handed on as they are
REDIS_CLIENT = frozenset({
    "username", "password", "credential_provider", "socket_keepalive_options", "db", "ssl", "ssl_ca_certs",
    "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_check_hostname",
    "ssl_ciphers", "ssl_min_version", "client", "startup_nodes"})

#: the same of NATS
NATS_CLIENT = frozenset({
    "servers", "token", "user", "password", "credential_provider", "nkeys_seed", "nkeys_seed_str", "user_credentials",
    "inbox_prefix", "tls_handshake_first", "ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs",
    "ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_check_hostname"})

_warned: set[str] = set()


@dataclass(frozen=True)
class Endpoint:
    """What `streambroker.connect` gets. `key` is equal for connections that can share an engine."""

    url: str = dataclasses.field(repr=False)
    options: Mapping[str, Any] = dataclasses.field(repr=False)
    adapter: KombuOptions

    @property
    def place(self) -> str:
        """The URL without who logs in."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"

    @property
    def key(self) -> tuple[str, str, KombuOptions]:
        # the text of a client says not all of it
        options = {name: id(value) if name == "client" else value for name, value in self.options.items()}
        return self.url, repr(sorted(options.items())), self.adapter


def redis_endpoint(connection: Connection) -> Endpoint:
    """Endpoint of the Redis Streams engine. TLS follows the scheme or `ssl`, and verifies unless told otherwise.

    Raises ConfigurationError.
    """
    options, adapter = _options(connection, REDIS_CLIENT)
    host = connection.hostname or "localhost"
    if options.get("client") is not None and not connection.hostname:
        return Endpoint("redis-streams://", options, adapter)
    if "://" in host:
        return Endpoint(_nested_url(host), options, adapter)
    secure = bool(connection.ssl) or connection.transport_cls == "rediss-streams"
    place = f"[{host}]" if ":" in host else host
    database = (connection.virtual_host or "/").strip("/") or "0"
    if not database.isdigit():
        raise ConfigurationError(f"the database in the broker URL is a number, not {database!r}: redis-streams://host/0")
    url = "{}://{}{}:{}/{}".format("rediss-streams" if secure else "redis-streams",
                                   _login(connection.userid, connection.password), place, connection.port or 6379,
                                   database)
    return Endpoint(url, options, adapter)


def sentinel_endpoint(connection: Connection) -> Endpoint:
    """Endpoint of the Redis Streams engine behind sentinels. All URLs of a failover list are sentinels of one group, so
    that it is the same one wherever Kombu stands in that list; login and database are the first that are given, and
    belong to the primary. Raises ConfigurationError."""
    options, adapter = _options(connection, REDIS_CLIENT | {"sentinels", "sentinel_kwargs"}, SentinelSettings)
    if connection.ssl:
        options["ssl"] = True
    host = connection.hostname or "localhost"
    # a lone URL with a plus is left to the transport
    urls = [each.partition("://") for each in connection.alt or [host] if each and "://" in each]
    places, logins, paths, queries = [], [], [], []
    for _, _, rest in urls:
        rest, _, query = rest.partition("?")
        netloc, _, path = rest.partition("/")
        login, _, place = netloc.rpartition("@")
        places.append(place)
        logins.append(login)
        paths.append(path.strip("/"))
        queries.append(query)
    if not places:
        places.append(f"{f'[{host}]' if ':' in host else host}:{connection.port or 26379}")
    login = next(filter(None, logins), "") or _login(connection.userid, connection.password).rstrip("@")
    database = next(filter(None, paths), "") or (connection.virtual_host or "/").strip("/") or "0"
    secure = any(scheme.lower().endswith("rediss") for scheme, _, _ in urls)
    scheme = "sentinel-streams+rediss" if secure else "sentinel-streams"
    url = f"{scheme}://{login}{'@' if login else ''}{','.join(places)}/{database}"
    return Endpoint(url, {**dict(parse_qsl(next(filter(None, queries), ""))), **options}, adapter)


def jetstream_endpoint(connection: Connection) -> Endpoint:
    """Endpoint of the JetStream engine. The alternates of a failover list are servers of one cluster: the engine goes
    from one to the next by itself. Raises ConfigurationError."""
    options, adapter = _options(connection, NATS_CLIENT, JetStreamSettings)
    if (connection.virtual_host or "/").strip("/"):
        raise ConfigurationError("a jetstream:// URL has no path; use the transport option prefix to keep applications "
                                 "apart")
    host = connection.hostname or "localhost"
    secure = bool(connection.ssl) or connection.transport_cls == "jetstream-tls"
    place = f"[{host}]" if ":" in host else host
    user, password = connection.userid, connection.password
    if callable(password):
        options = {"user": user, "password": password, **options}
        user = password = None
    # a lone one is a token
    login = _login(user, password) if user and password else f"{quote(user or password or '', safe='')}@".lstrip("@")
    url = f"{'jetstream-tls' if secure else 'jetstream'}://{login}{place}:{connection.port or 4222}"
    others = [other for other in connection.alt if other and urlsplit(other).hostname]
    if len(others) > 1 and "servers" not in options:
        options["servers"] = others
    return Endpoint(url, options, adapter)


def memory_endpoint(connection: Connection) -> Endpoint:
    options, adapter = split_options(connection.transport_options, frozenset())
    return Endpoint(f"memory://{connection.hostname or 'default'}", options, adapter)


def _options(connection: Connection, client: frozenset[str],
             kind: type[Settings] = Settings) -> tuple[dict[str, Any], KombuOptions]:
    """As `split_options`, with what a connection says outside of its URL and transport options."""
    options, adapter = split_options(connection.transport_options, client, kind)
    if "socket_connect_timeout" not in options and connection.connect_timeout:
        options["socket_connect_timeout"] = connection.connect_timeout
    provider = getattr(connection, "credential_provider", None)
    if provider:
        options["credential_provider"] = provider
    if isinstance(connection.ssl, Mapping):
        options.update((name if name.startswith("ssl_") else f"ssl_{name}", value)
                       for name, value in connection.ssl.items())
    return options, adapter


def split_options(given: Mapping[str, Any], client: frozenset[str],
                  kind: type[Settings] = Settings) -> tuple[dict[str, Any], KombuOptions]:
    """(options for the engine, options for the adapter). A name that nobody knows is logged once and left out, since
    one set of transport options often serves several transports; a value that cannot be used raises
    ConfigurationError."""
    known = frozenset(_engine_names(kind)) | client
    engine: dict[str, Any] = {}
    adapter: dict[str, Any] = {}
    own = {field.name: field for field in dataclasses.fields(KombuOptions)}
    for name, value in given.items():
        if name in own:
            adapter[name] = _checked(name, value, own[name].default)
        elif name in known:
            engine[name] = value
        elif name not in _KOMBU_OWN and name not in _warned:
            _warned.add(name)
            near = difflib.get_close_matches(name, [*known, *own], n=1)
            logger.warning("transport option %r is unknown and has no effect%s", name,
                           f"; did you mean {near[0]!r}?" if near else "")
    return engine, KombuOptions(**adapter)


def _engine_names(kind: type[Settings]) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        yield field.name
        yield from field.metadata["aliases"]
    yield from IGNORED


def _checked(name: str, value: Any, default: Any) -> Any:
    if default is None:
        if value is None or isinstance(value, str):
            return value or None
    elif isinstance(default, bool):
        if isinstance(value, (bool, int)):
            return bool(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    kind = {str: "a text", bool: "true or false"}.get(type(default) if default is not None else str, "above 0")
    raise ConfigurationError(f"transport option {name}: {value!r} cannot be used, it is {kind}")


def _nested_url(url: str) -> str:
    """`redis-streams+<url>`: Kombu leaves the part behind the plus to the transport."""
    scheme = urlsplit(url).scheme.lower()
    if scheme in ("unix", "socket"):
        return f"redis-streams+{url}".replace("virtual_host=", "db=")
    if scheme in ("redis", "valkey"):
        return "redis-streams" + url[len(scheme):]
    if scheme in ("rediss", "valkeys"):
        return "rediss-streams" + url[len(scheme):]
    raise ConfigurationError(f"redis-streams+{scheme}:// is unknown: unix, socket, redis or rediss follow the plus")


def _login(user: str | None, password: Any) -> str:
    if callable(password):
        password = password()
    if not user and not password:
        return ""
    return f"{quote(user or '', safe='')}:{quote(password or '', safe='')}@"
