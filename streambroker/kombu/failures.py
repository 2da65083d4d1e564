"""Which errors mean what to Kombu and Celery: reconnect, or refused."""

from __future__ import annotations

import time
import traceback

from amqp.exceptions import (
    AccessRefused,
    RecoverableChannelError,
    RecoverableConnectionError,
)
from kombu.exceptions import ChannelError, InconsistencyError
from kombu.exceptions import ConnectionError as KombuConnectionError

from ..errors import AuthenticationError, Closed, StoreConnectionError, StoreError


class LoginRefused(AccessRefused):
    """The store refused the credentials, or one side the other's certificate.

    Celery's worker goes on trying, since credentials may be in rotation. `Connection.ensure` does not, and tells the
    publisher at once; that needs a class that is no OSError, unlike `AuthenticationError`.
    """

    @classmethod
    def of(cls, error: AuthenticationError) -> LoginRefused:
        return cls(str(error), (10, 0), "Connection.open")

    def __str__(self) -> str:
        return str(self.reply_text)


class Refusals:
    """Slows a worker down whose credentials are refused: Celery comes back at once after an error that
    `ensure_connection` does not repeat. A publisher, also one inside a worker, is never slowed down."""

    #: longest pause in seconds, and where Celery's worker connects
    LONGEST, WORKER = 10.0, ("celery.worker.consumer.consumer", "ensure_connected")

    def __init__(self) -> None:
        self._count = 0

    def pause(self) -> None:
        if self._in_worker():
            self._count += 1
            time.sleep(min(2.0 * self._count, self.LONGEST))

    def _in_worker(self) -> bool:
        return any((frame.f_globals.get("__name__"), frame.f_code.co_name) == self.WORKER
                   for frame, _ in traceback.walk_stack(None))

    def over(self) -> None:
        self._count = 0


refusals = Refusals()

#: everything that a new connection may cure; Celery's worker reconnects on these
CONNECTION_ERRORS = (StoreConnectionError, Closed, OSError, KombuConnectionError, InconsistencyError, LoginRefused)
#: the store or a rule of AMQP refused one operation
CHANNEL_ERRORS = (StoreError, ChannelError)
#: what `Connection.ensure` tries again
RECOVERABLE_CONNECTION_ERRORS = (StoreConnectionError, Closed, OSError, RecoverableConnectionError)
RECOVERABLE_CHANNEL_ERRORS = (RecoverableChannelError,)
