"""What `benchmarks/chaos.py` does to a job, and what it has to prove."""
