"""The reference model: a store in this process's memory that keeps every rule of `streambroker.engine`.

For tests, and for the property-based comparison with the real engines. `store` is the model, one step at a time under
one lock; the other modules are the seam's shapes around it.
"""

from __future__ import annotations

from .engine import MemoryEngine

__all__ = ["MemoryEngine"]
