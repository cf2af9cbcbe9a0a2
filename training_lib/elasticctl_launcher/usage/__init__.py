"""What this worker uses of its machine: processors, memory, network and GPUs, measured beside training."""
