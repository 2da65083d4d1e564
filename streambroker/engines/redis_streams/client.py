"""redis-py connections from a URL and options: address, TLS (verified unless told otherwise), credentials, database."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import redis
import redis.backoff
import redis.connection
import redis.retry

from ...credentials import load_provider
from ...errors import ConfigurationError
from ...settings import Settings

#: options that go to the client as they are
CLIENT_OPTIONS = frozenset({
    "host", "port", "db", "path", "username", "password", "credential_provider", "socket_keepalive_options",
    "ssl", "ssl_keyfile", "ssl_certfile", "ssl_cert_reqs", "ssl_ca_certs", "ssl_ca_path", "ssl_ca_data",
    "ssl_check_hostname", "ssl_password", "ssl_min_version", "ssl_ciphers", "client", "startup_nodes"})
_TLS = frozenset({"rediss", "rediss-streams", "valkeys"})
_REQS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


class Address:
    """Where the store is and how to log in. Its text hides the password."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        parts = urlsplit(url)
        scheme = parts.scheme.lower()
        known: dict[str, Any] = dict(parse_qsl(parts.query))
        for name in known:
            if name not in CLIENT_OPTIONS:
                raise ConfigurationError(f"unknown option {name!r} in the URL")
        known.update({name: value for name, value in options.items() if value is not None})
        if "client" in known:
            if len(known) > 1 or parts.netloc or parts.path.strip("/"):
                raise ConfigurationError("the option client says where the store is and how to log in: leave that out "
                                         "of the URL (redis-streams://) and of the other options")
            known = _like(known["client"])
        self.path = known.pop("path", None)
        if scheme == "unix" or scheme.endswith(("+unix", "+socket")):
            self.path = self.path or unquote(parts.path)
            database = known.pop("db", 0)
        else:
            database = known.pop("db", None) or unquote(parts.path).strip("/") or 0
        if re.search(r";[\w+-]+://", url):
            raise ConfigurationError("one URL, please: only Celery's broker_url may list several, parted by semicolons")
        # a password that is not percent-encoded may be taken for either: neither is repeated
        try:
            port = parts.port
        except ValueError:
            raise ConfigurationError("the port in the URL must be a number up to 65535; in a password / ? # @ are "
                                     "written %2F %3F %23 %40") from None
        try:
            self.database = int(database)
        except ValueError:
            raise ConfigurationError("the database, in the URL or as the option db, must be a number: "
                                     "redis-streams://host:6379/0") from None
        self.host = known.pop("host", None) or parts.hostname or "localhost"
        self.port = int(known.pop("port", None) or port or 6379)
        self.username = known.pop("username", None) or (unquote(parts.username) if parts.username else None)
        self.password = known.pop("password", None) or (unquote(parts.password) if parts.password else None)
        self.credential_provider = load_provider(known.pop("credential_provider", None))
        tls = known.pop("ssl", None)
        self.tls = scheme in _TLS if tls is None else bool(tls)
        self.extra = {name: value for name, value in known.items() if self.tls or not name.startswith("ssl_")}
        if self.tls:
            reqs = self.extra.get("ssl_cert_reqs", ssl.CERT_REQUIRED)
            name = str(reqs).lower().removeprefix("cert_")
            self.extra["ssl_cert_reqs"] = reqs = _REQS.get(name, reqs)
            self.extra.setdefault("ssl_check_hostname", reqs == ssl.CERT_REQUIRED)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path} database {self.database}"
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}/{self.database}"

    __repr__ = __str__


def _like(client: Any) -> dict[str, Any]:
    """Address, login and TLS of a client or pool of redis-py. It is looked at once, and neither used nor closed: its
    repeats, time-outs and protocol are not what an engine needs."""
    pool = client if isinstance(client, redis.ConnectionPool) else getattr(client, "connection_pool", None)
    kind = getattr(pool, "connection_class", None)
    if kind not in (redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection):
        raise ConfigurationError(
            f"the option client takes a redis.Redis or redis.ConnectionPool with a connection class of redis-py, not "
            f"{type(client).__module__}.{type(client).__name__}: no asynchronous client, none of Sentinel "
            "and no class of your own; use a URL and credential_provider")
    known = {name: value for name, value in pool.connection_kwargs.items()  # type: ignore[union-attr]
             if name in CLIENT_OPTIONS and value is not None}
    return {**known, "ssl": kind is redis.SSLConnection}


class _Told(redis.CredentialProvider):
    """A provider whose errors, whatever they are, count as a refused login."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider

    def get_credentials(self) -> Any:
        try:
            return self._provider.get_credentials()
        except Exception as error:
            raise redis.AuthenticationError(f"no credentials: {type(error).__name__}: {error}") from error


def dialer(address: Address, settings: Settings) -> Callable[..., redis.Connection]:
    """A function that makes a new, unconnected redis-py connection, which is given that many seconds for each step of
    its handshake; keywords (host, port, ...) stand in for what the address says. Its own repeats are off: redis-py 8
    would send an XADD up to eleven times; RESP2, since the reply shapes of RESP3 differ."""
    options: dict[str, Any] = {
        "db": address.database,
        "username": address.username,
        "password": address.password,
        "credential_provider": None,
        "protocol": 2,
        "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        "health_check_interval": 0,
        "client_name": settings.client_name or "streambroker",
        **address.extra,
    }
    if address.credential_provider is not None:
        options.pop("username")
        options.pop("password")
        options["credential_provider"] = _Told(address.credential_provider)
    kind: Any
    if address.path:
        kind = redis.UnixDomainSocketConnection
        options["path"] = address.path
    else:
        kind = redis.SSLConnection if address.tls else redis.Connection
        options.update(host=address.host, port=address.port, socket_keepalive=settings.socket_keepalive)

    def dial(timeout: float, **instead: Any) -> redis.Connection:
        limits = {"socket_timeout": timeout, "socket_connect_timeout": min(timeout, settings.socket_connect_timeout)}
        connection: redis.Connection = kind(**{**limits, **options, **instead})
        return connection

    return dial
