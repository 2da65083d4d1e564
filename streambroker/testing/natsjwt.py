"""Decentralized login for nats-servers of tests: an operator, an account with JetStream, users with credentials files.

    operator = Operator()
    with NatsServer(config=operator.config) as server:
        connect(server.url(), user_credentials=operator.credentials("jobs"))
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from typing import Any

import nkeys

_NO_LIMITS = dict.fromkeys(("subs", "conn", "leaf", "imports", "exports", "data", "payload"), -1)
_STORAGE = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)


class KeyPair:
    """`public`, `seed`, and a signature."""

    def __init__(self, kind: int) -> None:
        self.seed: str = nkeys.encode_seed(secrets.token_bytes(32), kind).decode()
        self._pair = nkeys.from_seed(bytearray(self.seed.encode()))
        self.public: str = self._pair.public_key.decode()

    def sign(self, subject: str, name: str, claims: dict[str, Any], lifetime: float = 0.0) -> str:
        """A token of this issuer about `subject`; it expires after `lifetime` seconds, unless that is 0."""
        now = int(time.time())
        body = {"jti": secrets.token_hex(16), "iat": now, "iss": self.public, "sub": subject, "name": name,
                "nats": {"version": 2, **claims}, **({"exp": int(now + lifetime)} if lifetime else {})}
        text = ".".join(_part(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body))
        return f"{text}.{_part(self._pair.sign(text.encode()))}"


class Operator:
    """`config` is for the server; `credentials` makes users."""

    def __init__(self) -> None:
        operator, system = KeyPair(nkeys.PREFIX_BYTE_OPERATOR), KeyPair(nkeys.PREFIX_BYTE_ACCOUNT)
        self._account = KeyPair(nkeys.PREFIX_BYTE_ACCOUNT)
        accounts = ", ".join(
            f"{account.public}: " + operator.sign(account.public, name, {
                "type": "account", "limits": {**_NO_LIMITS, "wildcards": True, **limits},
                "default_permissions": {"pub": {}, "sub": {}}})
            for name, account, limits in (("jobs", self._account, _STORAGE), ("system", system, {})))
        self.config = (f"operator: {operator.sign(operator.public, 'test', {'type': 'operator'})}\n"
                       f"resolver: MEMORY\nsystem_account: {system.public}\nresolver_preload {{ {accounts} }}")

    def credentials(self, name: str, lifetime: float = 0.0) -> str:
        """The text of a credentials file; with `lifetime` the server ends it after so many seconds."""
        user = KeyPair(nkeys.PREFIX_BYTE_USER)
        claims: dict[str, Any] = {"type": "user", "pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1}
        token = self._account.sign(user.public, name, claims, lifetime)
        return (f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
                f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n")


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
