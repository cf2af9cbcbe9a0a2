"""Measurements of this project and its alternatives; docs/performance.md says how to run them."""
