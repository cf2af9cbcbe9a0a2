"""What this worker uses of its machine: CPUs, memory, network and GPUs, measured while it trains."""
