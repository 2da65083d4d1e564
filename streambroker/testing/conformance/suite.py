"""All test classes, to be imported with `*` by a module that has the `engines` fixture."""

from __future__ import annotations

from .broadcast import TestBroadcast
from .concurrency import TestConcurrency
from .dead import TestDeadLetters, TestForwarding
from .delay import TestDelay, TestSteeringDelays
from .fork import TestFork
from .hostile import TestBodies, TestNames
from .inspector import TestInspector
from .lease import TestLease, TestLostLease
from .limit import TestKilled, TestRejected
from .priority import TestPriority
from .publish import TestExpiry, TestPublish, TestQueues
from .receive import TestEventLoop, TestQueuesOfAConsumer, TestReceive
from .settle import TestClose, TestSettle
from .table import TestTable
from .transient import TestTransient

__all__ = [
    "TestBodies", "TestBroadcast", "TestClose", "TestConcurrency", "TestDeadLetters", "TestDelay", "TestEventLoop",
    "TestExpiry", "TestFork", "TestForwarding", "TestInspector", "TestKilled", "TestLease", "TestLostLease",
    "TestNames", "TestPriority", "TestPublish", "TestQueues", "TestQueuesOfAConsumer", "TestReceive", "TestRejected",
    "TestSettle", "TestSteeringDelays", "TestTable", "TestTransient",
]
