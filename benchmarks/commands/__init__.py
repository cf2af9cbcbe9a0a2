"""Where `benchmarks/cli.py` measures commands."""
