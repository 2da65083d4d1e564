"""Addresses of JetStream: which servers, which login, which TLS; and that secrets stay inside."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from streambroker.engines.jetstream.address import Address, Server
from streambroker.errors import AuthenticationError, ConfigurationError
from streambroker.testing.tls import Authority

CREDENTIALS = ("-----BEGIN NATS USER JWT-----\nthetoken\n------END NATS USER JWT------\n\n"
               "-----BEGIN USER NKEY SEED-----\nSUSEED\n------END USER NKEY SEED------\n")


def places(url: str, **options: Any) -> list[tuple[str, int]]:
    return [(server.host, server.port) for server in Address(url, options).servers]


@pytest.mark.parametrize("url, expected", [
    ("jetstream://", [("localhost", 4222)]),
    ("jetstream://a", [("a", 4222)]),
    ("JETSTREAM://a:1/", [("a", 1)]),
    ("nats://a:1,b,c:3", [("a", 1), ("b", 4222), ("c", 3)]),
    ("nats://a:1,a:1", [("a", 1)]),
    ("nats://u:p@a:1,b:2", [("a", 1), ("b", 2)]),
    ("nats://u:p@a:1,u:p@b:2", [("a", 1), ("b", 2)]),
    ("jetstream://u:p@a:1;jetstream://b:2;JetStream://c", [("a", 1), ("b", 2), ("c", 4222)]),
    ("nats://[::1]:5,[fe80::2]", [("::1", 5), ("fe80::2", 4222)]),
    ("nats://a?servers=b:2,nats://c:3", [("a", 4222), ("b", 2), ("c", 3)]),
])
def test_servers_of_a_url(url: str, expected: list[tuple[str, int]]) -> None:
    assert places(url) == expected


@pytest.mark.parametrize("servers", ["b:2;c:3", "jetstream://b:2, nats://c:3/", ["nats://b:2", "c:3"]])
def test_more_servers_by_option(servers: Any) -> None:
    assert places("jetstream://a", servers=servers) == [("a", 4222), ("b", 2), ("c", 3)]


def test_a_number_with_colons_is_written_in_brackets() -> None:
    assert [str(Server("::1", 5)), str(Server("a", 5))] == ["[::1]:5", "a:5"]


@pytest.mark.parametrize("url, options, expected", [
    ("nats://a", {}, {}),
    ("nats://u:p@a", {}, {"user": "u", "password": "p"}),
    ("nats://u%40x:p%2F%3A%2C@a,b", {}, {"user": "u@x", "password": "p/:,"}),
    ("nats://u:@a", {}, {"user": "u", "password": ""}),
    ("nats://secret%3A@a", {}, {"token": "secret:"}),
    ("nats://a", {"token": "t"}, {"token": "t"}),
    ("nats://u:p@a", {"token": "t"}, {"token": "t"}),
    ("nats://u:p@a", {"password": "q"}, {"user": "u", "password": "q"}),
    ("nats://u:p@a", {"user": "v", "password": "q"}, {"user": "v", "password": "q"}),
    ("nats://u@a", {"password": "q"}, {"user": "u", "password": "q"}),
    ("nats://a?token=t", {}, {"token": "t"}),
    ("nats://u:p@a", {"nkeys_seed_str": "SU"}, {"nkeys_seed_str": "SU"}),
    ("nats://u:p@a", {"user_credentials": CREDENTIALS}, {"user_credentials": CREDENTIALS}),
])
def test_logins(url: str, options: dict[str, Any], expected: dict[str, str]) -> None:
    assert Address(url, options).login() == expected


def test_keys_and_credentials_of_files_are_read_at_each_login(tmp_path: Path) -> None:
    seed, credentials, token = (tmp_path / name for name in ("seed", "creds", "jwt"))
    seed.write_text("SU1\n")
    credentials.write_text(CREDENTIALS)
    token.write_text("thetoken\n")
    by_seed = Address("nats://a", {"nkeys_seed": str(seed)})
    assert by_seed.login() == {"nkeys_seed_str": "SU1"}
    seed.write_text("SU2")
    assert by_seed.login() == {"nkeys_seed_str": "SU2"}
    for given in (credentials, str(credentials)):
        assert Address("nats://a", {"user_credentials": given}).login()["user_credentials"] == CREDENTIALS.strip()
    both = Address("nats://a", {"user_credentials": (str(token), str(seed))}).login()["user_credentials"]
    assert both == CREDENTIALS.replace("SUSEED", "SU2")


@pytest.mark.parametrize("content", ["", "-----BEGIN NATS USER JWT-----\nthetoken\n", "-----BEGIN NATS USER JWT-----"])
def test_a_file_that_is_no_credentials_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "creds").write_text(content)
    with pytest.raises(ConfigurationError, match="user_credentials: no credentials file") as caught:
        Address("nats://a", {"user_credentials": str(tmp_path / "creds")}).login()
    assert "thetoken" not in str(caught.value)


@pytest.mark.parametrize("name", ["nkeys_seed", "user_credentials"])
def test_a_file_that_is_missing_is_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}: the file cannot be read: No such file"):
        Address("nats://a", {name: str(tmp_path / "nothing")}).login()


@pytest.mark.parametrize("url, options", [
    ("nats://hidden1@a", {}),
    ("nats://u:hidden1@a,b", {}),
    ("nats://a?token=hidden1", {}),
    ("nats://a", {"token": "hidden1"}),
    ("nats://a", {"user": "u", "password": "hidden1"}),
    ("nats://a", {"nkeys_seed_str": "hidden1"}),
    ("nats://a", {"user_credentials": CREDENTIALS.replace("SUSEED", "hidden1")}),
    ("nats://a", {"servers": ["nats://u:hidden1@b"]}),
])
def test_no_text_of_an_address_shows_a_secret(url: str, options: dict[str, Any]) -> None:
    address = Address(url, options)
    assert "hidden1" not in f"{address} {address!r} {address.servers!r}"
    assert str(address).startswith("jetstream://a:4222")


@pytest.mark.parametrize("url, options, told", [
    ("jetstream:a", {}, "looks like jetstream://host:4222"),
    ("ws://a", {}, "known: jetstream, jetstream-tls, nats, tls"),
    ("jetstream://a/vhost", {}, "has no path"),
    ("jetstream://a:port", {}, "host:port"),
    ("jetstream://a:99999", {}, "host:port"),
    ("jetstream://u:hidden1@a,u:hidden2@b", {}, "share one login"),
    ("jetstream://a?nonsense=1", {}, "unknown option 'nonsense'"),
    ("jetstream://a", {"inbox_prefix": "a.*"}, "inbox_prefix"),
    ("jetstream://a", {"inbox_prefix": "a b"}, "inbox_prefix"),
    ("jetstream://a", {"tls_handshake_first": "perhaps"}, "neither true nor false"),
    ("jetstream://a", {"servers": "ws://b"}, "known: jetstream"),
])
def test_what_cannot_be_used_is_told_without_secrets(url: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as caught:
        Address(url, options)
    assert "hidden" not in str(caught.value)


def test_inboxes() -> None:
    assert Address("nats://a", {}).inbox_prefix == "_INBOX"
    assert Address("nats://a", {"inbox_prefix": "_INBOX.jobs."}).inbox_prefix == "_INBOX.jobs"


# ---------------------------------------------------------------- TLS

@pytest.mark.parametrize("url, options, wanted", [
    ("jetstream://a", {}, False), ("nats://a", {"ssl": False}, False), ("jetstream-tls://a", {}, True),
    ("tls://a", {}, True), ("jetstream://a", {"ssl": True}, True), ("jetstream://a?ssl=true", {}, True),
    ("jetstream://a", {"tls_handshake_first": True}, True),
])
def test_when_tls_is_demanded(url: str, options: dict[str, Any], wanted: bool) -> None:
    address = Address(url, options)
    assert address.tls is wanted
    assert (address.context() is not None) is wanted


def test_tls_verifies_unless_told_otherwise(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = Address("tls://a", {"ssl_ca_certs": str(authority.ca_file)}).context()
    assert context is not None and context.check_hostname and context.verify_mode == ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 1
    for none in ("none", "CERT_NONE", ssl.CERT_NONE):
        context = Address("tls://a", {"ssl_cert_reqs": none}).context()
        assert context is not None and not context.check_hostname and context.verify_mode == ssl.CERT_NONE
    context = Address("tls://a?ssl_check_hostname=false", {}).context()
    assert context is not None and not context.check_hostname and context.verify_mode == ssl.CERT_REQUIRED


@pytest.mark.parametrize("options", [
    {"ssl_ca_certs": "/nothing/ca.pem"}, {"ssl_certfile": "/nothing/client.pem"}, {"ssl_cert_reqs": "maybe"}])
def test_tls_options_that_cannot_be_used_are_told(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="the TLS options cannot be used"):
        Address("tls://a", options).context()


class Tokens:
    """A provider with another answer each time."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._count = 0

    def get_credentials(self) -> tuple[str, ...]:
        self._count += 1
        return *self._names, f"secret-{self._count}"


def test_providers_and_functions_are_asked_each_time() -> None:
    tokens = Tokens()
    for options in ({"credential_provider": Tokens("jobs")},
                    {"user": lambda: "jobs", "password": lambda: tokens.get_credentials()[0]}):
        address = Address("nats://a", options)
        assert [address.login() for _ in range(2)] == [
            {"user": "jobs", "password": "secret-1"}, {"user": "jobs", "password": "secret-2"}]
        assert "secret" not in repr(address)
    assert Address("nats://a", {"credential_provider": Tokens()}).login() == {"token": "secret-1"}
    assert Address("nats://jobs@a", {"password": lambda: "pw"}).login() == {"user": "jobs", "password": "pw"}


def test_a_provider_that_fails_is_a_refused_login() -> None:
    with pytest.raises(AuthenticationError, match="no credentials: ZeroDivisionError"):
        Address("nats://a", {"token": lambda: 1 / 0}).login()
    with pytest.raises(ConfigurationError, match=r"package\.module\.Class"):
        Address("nats://a", {"credential_provider": "nowhere.Absent"})
