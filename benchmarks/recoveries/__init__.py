"""What the benchmarks of recovery have in common: contenders, what happens to them, and what it cost."""
