"""Where the servers are and how to log in, from a URL and options. Its text never shows a secret."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ...credentials import load_provider
from ...errors import AuthenticationError, ConfigurationError

#: options of an address; all may stand in the URL's query too
CLIENT_OPTIONS = frozenset({
    "servers", "user", "password", "token", "credential_provider", "nkeys_seed", "nkeys_seed_str", "user_credentials",
    "ssl", "ssl_ca_certs", "ssl_ca_data", "ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_cert_reqs",
    "ssl_check_hostname", "tls_handshake_first", "inbox_prefix"})
SCHEMES = frozenset({"jetstream", "nats", "jetstream-tls", "tls"})
_TLS = frozenset({"jetstream-tls", "tls"})
_REQS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_PORT = 4222
_TOKEN_MARK, _SEED_MARK = "BEGIN NATS USER JWT", "BEGIN USER NKEY SEED"


@dataclass(frozen=True, slots=True)
class Server:
    """One server. `tls_name` is whose certificate it must show when that is not `host`: servers that a cluster
    announces by number keep the name of the one that was asked."""

    host: str
    port: int
    tls_name: str = ""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Address:
    """`servers` in the order given, whether `tls` is demanded, and `inbox_prefix`. Raises ConfigurationError."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        scheme, rest = _split(url)
        parts = urlsplit("//" + rest)
        known: dict[str, Any] = dict(parse_qsl(parts.query))
        for name in known:
            if name not in CLIENT_OPTIONS:
                raise ConfigurationError(f"unknown option {name!r} in the URL")
        known.update({name: options[name] for name in CLIENT_OPTIONS if options.get(name) is not None})
        if parts.path.strip("/"):
            raise ConfigurationError("a jetstream URL has no path: one server's users are kept apart by the option "
                                     "`prefix` or by accounts")
        logins: list[tuple[str | None, str | None]] = []
        servers: list[Server] = []
        for netloc in [parts.netloc, *_netlocs(known.pop("servers", ()))]:
            login, found = _read_netloc(netloc)
            servers += found
            logins += login
        self.servers = tuple(dict.fromkeys(servers))
        user, password = _only(logins)
        self._login = _login(user, password, known)
        self.inbox_prefix = str(known.get("inbox_prefix") or "_INBOX").rstrip(".")
        _check_subject("inbox_prefix", self.inbox_prefix)
        asked = known.get("ssl")
        self.tls = scheme in _TLS if asked is None else _truth("ssl", asked)
        self.handshake_first = _truth("tls_handshake_first", known.get("tls_handshake_first", False))
        self.tls = self.tls or self.handshake_first
        self._ssl = {name: value for name, value in known.items() if name.startswith("ssl_")}

    def login(self) -> dict[str, Any]:
        """What logs in, each a text: `user` and `password`, `token`, `nkeys_seed_str` or `user_credentials` (what such
        a file holds). Files are read, and providers and functions called, each time. Raises ConfigurationError when a
        file cannot be used, AuthenticationError when a provider fails."""
        login = _asked(dict(self._login))
        if "nkeys_seed" in login:
            login["nkeys_seed_str"] = _read("nkeys_seed", login.pop("nkeys_seed"))
        if "user_credentials" in login:
            login["user_credentials"] = _read_credentials(login["user_credentials"])
        return login

    def context(self) -> ssl.SSLContext | None:
        """TLS as asked for, verifying unless told otherwise; None for a plain address without any TLS option. Raises
        ConfigurationError when a file cannot be used."""
        if not self.tls and not self._ssl:
            return None
        given = self._ssl
        reqs = given.get("ssl_cert_reqs", ssl.CERT_REQUIRED)
        mode = _REQS.get(str(reqs).lower().removeprefix("cert_"), reqs)
        try:
            context = ssl.create_default_context(cafile=given.get("ssl_ca_certs"), cadata=given.get("ssl_ca_data"))
            check = given.get("ssl_check_hostname", mode == ssl.CERT_REQUIRED)
            context.check_hostname = _truth("ssl_check_hostname", check)
            context.verify_mode = mode
            if given.get("ssl_certfile"):
                context.load_cert_chain(given["ssl_certfile"], given.get("ssl_keyfile"), given.get("ssl_password"))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(f"the TLS options cannot be used: {error}; look at ssl_ca_certs, ssl_certfile, "
                                     "ssl_keyfile and ssl_cert_reqs") from error
        return context

    def __str__(self) -> str:
        return f"{'jetstream-tls' if self.tls else 'jetstream'}://{','.join(map(str, self.servers))}"

    def __repr__(self) -> str:
        return f"<Address {self}>"


def _split(url: str) -> tuple[str, str]:
    scheme, mark, rest = url.partition("://")
    if not mark:
        raise ConfigurationError("a jetstream URL looks like jetstream://host:4222")
    scheme = scheme.lower()
    if scheme not in SCHEMES:
        raise ConfigurationError(f"no servers behind {scheme}://; known: {', '.join(sorted(SCHEMES))}")
    # Kombu's list of servers has the scheme before each
    return scheme, re.sub(rf"(?i)[;,](?:{'|'.join(SCHEMES)})://", ",", rest)


def _netlocs(servers: Any) -> list[str]:
    """Of the option `servers`: URLs or host:port, a sequence or parted by commas or semicolons."""
    listed: Iterable[Any] = servers.replace(";", ",").split(",") if isinstance(servers, str) else servers
    netlocs = []
    for server in map(str, listed):
        if server.strip():
            rest = _split(server.strip())[1] if "://" in server else server.strip()
            netlocs.append(urlsplit("//" + rest).netloc)
    return netlocs


def _read_netloc(netloc: str) -> tuple[list[tuple[str | None, str | None]], list[Server]]:
    """Logins and servers of `user:password@host:port,host:port`."""
    if netloc.count("@") <= 1:
        head, at, hosts = netloc.rpartition("@")
        parts = [f"{head}{at}{host}" if index == 0 else host for index, host in enumerate(hosts.split(","))]
    else:
        parts = netloc.split(",")
    logins: list[tuple[str | None, str | None]] = []
    servers = []
    for part in parts:
        head, at, place = part.rpartition("@")
        if at and head:
            user, colon, password = head.partition(":")
            logins.append((unquote(user), unquote(password) if colon else None))
        try:
            split = urlsplit("//" + place)
            servers.append(Server(split.hostname or "localhost", split.port or _PORT))
        except ValueError:
            # it may be a part of a password
            raise ConfigurationError("a server is written host:port; in a password / ? # @ are written %2F %3F %23 "
                                     "%40") from None
    return logins, servers


def _only(logins: list[tuple[str | None, str | None]]) -> tuple[str | None, str | None]:
    if len(set(logins)) > 1:
        raise ConfigurationError("all servers of one address share one login: name it once")
    return logins[0] if logins else (None, None)


def _login(user: str | None, password: str | None, known: Mapping[str, Any]) -> dict[str, Any]:
    """Options win over the URL; a user without a password in the URL is a token."""
    if known.get("credential_provider"):
        return {"credential_provider": load_provider(known["credential_provider"])}
    if known.get("user_credentials"):
        return {"user_credentials": known["user_credentials"]}
    for name in ("nkeys_seed", "nkeys_seed_str"):
        if known.get(name):
            return {name: known[name]}
    if known.get("token"):
        return {"token": known["token"]}
    if known.get("user"):
        return {"user": known["user"], "password": known.get("password") or password or ""}
    if known.get("password"):
        password = known["password"]
    if user is None:
        return {}
    return {"token": user} if password is None else {"user": user, "password": password}


def _asked(login: dict[str, Any]) -> dict[str, Any]:
    """With the answers of a provider, and of functions in the place of texts."""
    try:
        if "credential_provider" in login:
            *user, password = login["credential_provider"].get_credentials()
            return {"user": str(user[0]), "password": str(password)} if user else {"token": str(password)}
        return {name: value() if callable(value) else value for name, value in login.items()}
    except Exception as error:
        raise AuthenticationError(f"no credentials: {type(error).__name__}: {error}") from error


def _read_credentials(given: Any) -> str:
    """Of a credentials file, given by path or as text, or of two files: the token's and the seed's."""
    if isinstance(given, (tuple, list)):
        token, seed = (_read("user_credentials", path) for path in given)
        return (f"-----{_TOKEN_MARK}-----\n{token}\n------END NATS USER JWT------\n\n"
                f"-----{_SEED_MARK}-----\n{seed}\n------END USER NKEY SEED------\n")
    text = given if _TOKEN_MARK in str(given) else _read("user_credentials", given)
    if not all(any(mark in line for line in text.splitlines()[:-1]) for mark in (_TOKEN_MARK, _SEED_MARK)):
        raise ConfigurationError(f"option user_credentials: no credentials file: {_TOKEN_MARK} or {_SEED_MARK} is "
                                 "missing")
    return str(text)


def _read(name: str, path: Any) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise ConfigurationError(f"option {name}: the file cannot be read: {reason}") from None


def _check_subject(name: str, subject: str) -> None:
    if not subject or any(not token or token.split() != [token] or token in ("*", ">") for token in subject.split(".")):
        raise ConfigurationError(f"option {name}: {subject!r} is no subject: words parted by dots, without wildcards")


def _truth(name: str, value: Any) -> bool:
    if isinstance(value, str):
        if value.lower() in ("1", "true", "yes", "on"):
            return True
        if value.lower() in ("0", "false", "no", "off", ""):
            return False
        raise ConfigurationError(f"option {name}: {value!r} is neither true nor false")
    return bool(value)
