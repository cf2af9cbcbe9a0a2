"""A week on a shared cluster, simulated: what `benchmarks/sharing.py` runs."""
