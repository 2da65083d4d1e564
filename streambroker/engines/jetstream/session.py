"""One connection made by nats-py, from login to its end. nats-py dials, logs in, negotiates TLS, parses and keeps the
connection alive; it neither reconnects nor subscribes: a link makes a new session, and writes its own commands.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.client import Client, RawCredentials

from ...errors import AuthenticationError, ConfigurationError, StoreConnectionError, StoreUnavailable
from ...settings import Settings
from .address import Address, Server
from .loop import Loop

#: (sid, subject, reply, data, header block or None): what a message brings
Deliver = Callable[[int, bytes, bytes, bytes, "bytes | None"], None]

logger = logging.getLogger(__name__)

#: a dead connection is noticed after one to two of these
PING_INTERVAL = 10
_REFUSED = ("authorization violation", "authentication expired", "authentication revoked")
_FULL = ("maximum connections exceeded", "maximum account active connections exceeded", "server shutdown")


class _Client(Client):
    """Hands messages over as they are parsed: no queue, no task and no limit between the parser and us."""

    def __init__(self, deliver: Deliver, *, tls: bool) -> None:
        super().__init__()
        self._deliver = deliver
        self._tls_wanted = tls
        self.info: dict[str, Any] = {}
        #: we are done with it: what it still says is no news
        self.over = False

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self._tls_wanted and not info.get("tls_required"):
            if not info.get("tls_available"):
                raise nats.errors.SecureConnWantedError
            # nats-py looks at this one alone: it would log in without TLS
            info["tls_required"] = True
        self.info.update(info)
        await super()._process_info(info, initial_connection)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: Any) -> None:
        self._deliver(sid, subject, reply, data, headers or None)


class Session:
    """In the loop's thread only. Made by `open_session`; over when `ended` is."""

    def __init__(self, client: _Client, address: Address, server: Server, loop: Loop) -> None:
        self._client = client
        self._address = address
        self._loop = loop
        self._transport: Any = client._transport
        self.server = server
        reading = client._reading_task
        assert reading is not None
        #: ends with the connection, whatever ends it
        self.ended: asyncio.Task[Any] = reading

    @property
    def info(self) -> dict[str, Any]:
        """What the server told about itself, its latest word."""
        return self._client.info

    @property
    def alive(self) -> bool:
        return not self.ended.done() and bool(self._client.is_connected)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    async def flush(self, timeout: float) -> None:
        """Return when the server has handled everything written before, and everything it sent before was handed over.
        Raises StoreConnectionError; a connection that does not answer in time is ended."""
        # shielded: nats-py stumbles over an answer that nobody waits for any more
        ping = asyncio.ensure_future(self._ping(timeout))
        ping.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(ping)
        if not self.alive:
            raise StoreConnectionError(f"the connection to {self.server} broke")

    async def _ping(self, timeout: float) -> None:
        try:
            await self._client.flush(max(timeout, 0.001))  # type: ignore[arg-type]
        except (OSError, nats.errors.Error, asyncio.TimeoutError) as error:
            _drop(self._client, self._loop)
            raise translate(error, self.server) from error

    def discovered(self) -> list[Server]:
        """Servers of the cluster, as this one tells."""
        servers = []
        for place in self.info.get("connect_urls") or ():
            host, _, port = place.rpartition(":")
            name = self.server.tls_name or self.server.host
            servers.append(Server(host.strip("[]"), int(port), name))
        return servers

    def connect_command(self, info: dict[str, Any]) -> bytes:
        """The command that logs another connection in, one that was greeted with `info`."""
        other = copy.copy(self._client)
        other._server_info = info
        # the login may have changed since
        other.options = {**other.options, **{name: value for name, value in self._address.login().items()
                                             if name in ("user", "password", "token")}}
        return bytes(other._connect_command())

    async def close(self, timeout: float) -> None:
        """End it; waits at most that long for what was written to go out."""
        self._client.over = True
        try:
            await asyncio.wait_for(self._client.close(), timeout)
        except (OSError, nats.errors.Error, asyncio.TimeoutError, asyncio.CancelledError) as error:
            logger.debug("closing the connection to %s: %s", self.server, type(error).__name__)
        finally:
            _drop(self._client, self._loop)


def _drop(client: Client, loop: Loop) -> None:
    """Whatever state it is in, its socket is closed now."""
    if client._transport:
        # asyncio of Python 3.10 counts a TLS transport that was only aborted as never closed
        client._transport.close()  # type: ignore[no-untyped-call]
    loop.cut()


async def open_session(address: Address, server: Server, settings: Settings, loop: Loop, deliver: Deliver,
                       tell: Callable[[Exception], None]) -> Session:
    """Connect to one server and log in. `tell` gets what the server complains about later. Raises StoreConnectionError,
    AuthenticationError, ConfigurationError."""
    login = address.login()
    if "user_credentials" in login:
        login["user_credentials"] = RawCredentials(login["user_credentials"])
    context = address.context()
    client = _Client(deliver, tls=address.tls and not address.handshake_first)

    troubles: list[Exception] = []

    async def on_error(error: Exception) -> None:
        troubles.append(error)
        if not client.over:
            tell(error)

    options: dict[str, Any] = {"connect_timeout": settings.socket_connect_timeout}
    if server.tls_name:
        options["tls_hostname"] = server.tls_name
    if context is not None:
        options["tls"] = context
    if address.handshake_first:
        options["tls_handshake_first"] = True
    try:
        await client.connect(
            servers=[f"nats://{server}"], error_cb=on_error, name=settings.client_name or "streambroker",
            allow_reconnect=False, max_reconnect_attempts=1, reconnect_time_wait=0, dont_randomize=True,
            ping_interval=PING_INTERVAL, max_outstanding_pings=1, inbox_prefix=address.inbox_prefix, **login,
            **options)
        if not client.is_connected:
            raise StoreConnectionError(f"{server} closed the connection during the login")
    except ModuleNotFoundError as error:
        raise ConfigurationError("nkeys and credentials files need the package nkeys: pip install "
                                 "'streambroker[jetstream]'") from error
    except (OSError, nats.errors.Error, asyncio.TimeoutError) as error:
        _drop(client, loop)
        # after a refused connection nats-py itself says no more than that there is no further server
        raise translate(troubles[-1] if troubles else error, server) from error
    except BaseException as error:
        _drop(client, loop)
        if isinstance(error, Exception) and ("nkeys_seed_str" in login or "user_credentials" in login):
            # whatever the key's package raises; its text could show the key
            raise ConfigurationError(f"the key or the credentials are none: {type(error).__name__}") from None
        raise
    return Session(client, address, server, loop)


def translate(error: BaseException, server: Server | None = None) -> StoreConnectionError:
    """nats-py's and the system's errors as ours."""
    if isinstance(error, StoreConnectionError):
        return error
    at = f"{server}: " if server else ""
    text = str(error).removeprefix("nats: ").strip("'")
    lower = text.lower()
    if isinstance(error, nats.errors.SecureConnWantedError):
        return StoreConnectionError(f"{at}the server has no TLS, and the address demands it; nothing was sent")
    if isinstance(error, nats.errors.AuthorizationError) or any(word in lower for word in _REFUSED):
        return AuthenticationError(f"{at}the server refused the login ({text}); look at user, password, token, key or "
                                   "credentials file")
    if any(word in lower for word in _FULL):
        return StoreUnavailable(f"{at}{text}")
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return StoreConnectionError(f"{at}no answer in time")
    return StoreConnectionError(f"{at}{text or type(error).__name__}")
