"""The rules of `streambroker.engine` as tests, for any engine.

    from streambroker.testing.conformance.suite import *  # the test classes

    @pytest.fixture
    def engines():
        made = ...  # a subclass of `kit.Engines`
        yield made
        made.close()
"""

from __future__ import annotations

import pkgutil
import sys

if "pytest" in sys.modules:
    import pytest

    # before any of them is imported; a process that only dies for the suite has no pytest
    pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))
