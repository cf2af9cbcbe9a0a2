"""A simulated week on a shared cluster, for `benchmarks/sharing.py`."""
