"""`connect`, and what importing the package costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import streambroker
from streambroker.connection import connect
from streambroker.engines.memory import MemoryEngine
from streambroker.errors import ConfigurationError


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_function_stays_a_function() -> None:
    """A submodule of the same name would take its place at the first import."""
    for _ in range(2):
        engine = streambroker.connect("memory://twice")
        assert isinstance(engine, MemoryEngine)
        engine.close()


def test_engines_of_one_name_share_a_store() -> None:
    first, second, stranger = connect("memory://one"), connect("memory://one"), connect("memory://two")
    first.publish("q", [streambroker.Message(b"x")])
    assert (second.ready("q"), stranger.ready("q")) == (1, 0)
    for engine in (first, second, stranger):
        engine.close()


@pytest.mark.parametrize("url", ["", "nonsense", "http://localhost", "amqp://guest@localhost//", "//host"])
def test_an_unknown_scheme_names_the_known_ones(url: str) -> None:
    with pytest.raises(ConfigurationError, match="redis-streams"):
        connect(url)


@pytest.mark.parametrize("url", ["ftp://user:secret@host/0", "user:secret@host", "redis-streams://:secret/x@host/0",
                                 "redis-streams://:1/secret@host/0", "jetstream://user:secret#more@host",
                                 "jetstream://user:secret?more@host"])
def test_secrets_are_not_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        connect(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["memory://x", "redis-streams://localhost:1"])
def test_options_are_checked_before_anything_is_connected(url: str) -> None:
    with pytest.raises(ConfigurationError, match="did you mean visibility_timeout"):
        connect(url, visibility_timout=5)
    with pytest.raises(ConfigurationError, match="out of bounds"):
        connect(url, visibility_timeout=0)


@pytest.mark.parametrize("scheme", ["redis-streams", "redis", "valkey-streams", "valkey", "REDIS-STREAMS"])
def test_nothing_is_connected_before_it_is_needed(scheme: str) -> None:
    engine = connect(f"{scheme}://127.0.0.1:1/0")
    assert engine.capabilities.name == "redis-streams"
    engine.close()


def test_the_scheme_of_a_memory_store() -> None:
    with pytest.raises(ConfigurationError, match="memory://name"):
        MemoryEngine.from_url("redis://x")


def test_importing_the_package_imports_no_client_and_no_framework() -> None:
    heavy = ("redis", "nats", "celery", "dramatiq", "asyncio", "streambroker.engines")
    loaded = run(f"import sys, streambroker; print([name for name in {heavy!r} if name in sys.modules])")
    assert loaded == "[]"


def test_without_the_client_package_it_says_what_to_install() -> None:
    text = run("import sys; sys.modules['redis'] = None\n"
               "import streambroker\n"
               "from streambroker.errors import ConfigurationError\n"
               "try: streambroker.connect('redis-streams://localhost')\n"
               "except ConfigurationError as error: print(error)")
    assert "pip install 'streambroker[redis]'" in text


def test_the_package_has_what_it_names() -> None:
    for name in streambroker.__all__:
        assert getattr(streambroker, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        streambroker.nonsense  # noqa: B018
