"""Measurements of this project beside what else one could use; docs/performance.md says how to run them."""
