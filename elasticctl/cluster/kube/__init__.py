"""Kubernetes as a place to run jobs at."""
