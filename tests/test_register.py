"""How Kombu learns of the URL schemes: in fresh processes, since registration is about what is imported when."""

from __future__ import annotations

import subprocess
import sys

import pytest

import streambroker


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("first", ["import streambroker", "import kombu.transport", "import kombu.connection"])
def test_importing_the_package_registers_in_any_order(first: str) -> None:
    code = f"{first}\nimport streambroker\nfrom kombu import Connection\n" \
           "print(Connection('redis-streams://h/1').transport_cls)"
    assert python(code) == "redis-streams"


def test_the_entry_point_alone_registers() -> None:
    """What Kombu does with the entry point while `kombu.serialization` is half imported."""
    code = "from streambroker import serializer\nimport kombu.serialization\n" \
           "from kombu.transport import TRANSPORT_ALIASES as known\nprint(sorted(set(known) & " \
           "{'redis-streams', 'rediss-streams', 'valkey-streams'}), len(serializer))"
    assert python(code) == "['redis-streams', 'rediss-streams', 'valkey-streams'] 4"


def test_nothing_of_kombu_or_a_client_is_imported() -> None:
    code = "import streambroker, sys\nprint([name for name in sys.modules if name.split('.')[0] in " \
           "('kombu', 'celery', 'redis', 'nats', 'dramatiq', 'amqp')])"
    assert python(code) == "[]"


def test_it_works_without_kombu() -> None:
    code = "import sys\nsys.modules['kombu'] = None\nimport streambroker\nprint(streambroker.kombu.DURABLE)"
    assert "task_acks_late" in python(code)


def test_it_never_raises() -> None:
    code = "import sys, types\nsys.modules['kombu.transport'] = types.SimpleNamespace(TRANSPORT_ALIASES=1)\n" \
           "import streambroker\nprint('fine')"
    assert python(code) == "fine"


def test_schemes_of_others_are_left_alone() -> None:
    code = "from kombu.transport import TRANSPORT_ALIASES as known\nknown['redis-streams'] = 'mine:Transport'\n" \
           "before = dict(known)\nimport streambroker\nprint([name for name in before if known[name] != before[name]])"
    assert python(code) == "[]"


def test_the_serializer_is_harmless() -> None:
    encode, decode, _, _ = streambroker.serializer
    with pytest.raises(ValueError, match="no serializer"):
        encode({})
    with pytest.raises(ValueError, match="no serializer"):
        decode(b"")


def test_every_scheme_leads_to_a_transport() -> None:
    from kombu.utils.imports import symbol_by_name

    for place in streambroker.TRANSPORTS.values():
        assert symbol_by_name(place).driver_type == "redis"
