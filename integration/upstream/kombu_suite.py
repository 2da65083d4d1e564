"""Kombu's integration base classes on the URL in TEST_BROKER; collected by run_kombu in the unpacked distribution."""

from __future__ import annotations

import os

import kombu
import pytest
from t.integration import common

import streambroker  # noqa: F401  a program whose first use of Kombu is a Connection registers our schemes so

URL = os.environ["TEST_BROKER"]
#: nobody listens there
DEAD = os.environ["TEST_BROKER_DEAD"]


@pytest.fixture(params=[{}, {"global_keyprefix": "_prefixed_"}], ids=["plain", "prefix"])
def connection(request: pytest.FixtureRequest) -> kombu.Connection:
    return kombu.Connection(URL, transport_options=dict(request.param))


@pytest.fixture
def invalid_connection() -> kombu.Connection:
    return kombu.Connection(DEAD)


@pytest.fixture
def failover_connection() -> kombu.Connection:
    return kombu.Connection(f"{DEAD};{URL}", connect_timeout=10)


class test_basic_functionality(common.BasicFunctionality):
    pass


class test_exchange_types(common.BaseExchangeTypes):
    pass


class test_time_to_live(common.BaseTimeToLive):
    pass


class test_priority(common.BasePriority):
    # 0 first, as in Kombu's own Redis transport
    PRIORITY_ORDER = "desc"


class test_message(common.BaseMessage):
    pass


class test_event_loop(getattr(common, "BaseEventLoop", object)):  # Kombu 5.6 up
    pass


class test_failover(common.BaseFailover):
    pass


@pytest.mark.skipif(URL.startswith("redis://"), reason="an option of ours")
class test_priority_amqp(common.BasePriority):
    PRIORITY_ORDER = "asc"

    @pytest.fixture
    def connection(self) -> kombu.Connection:
        return kombu.Connection(URL, transport_options={"global_keyprefix": "amqp_order", "priority_order": "amqp"})
