"""Measurements of this project and its alternatives; docs/performance.md describes how to run them."""
