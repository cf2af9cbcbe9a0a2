"""Any JSON at all, under the keys that a status has."""

from __future__ import annotations

from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("2024-01-01T00:00:00Z"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


KEYS = [
    "phase", "conditions", "replicaStatuses", "workers", "restarts", "backoff", "interruptions", "scalings", "progress",
    "checkpoint", "curve", "firstFailure", "lastFailure", "startTime", "active", "generations", "workerSeconds",
]  # fmt: skip
