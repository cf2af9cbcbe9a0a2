"""The parts of benchmarks/checkpoint.py: the server, the contenders, the processes that are measured, the results."""
