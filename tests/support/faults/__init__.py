"""Faults that are injected into a training job, and the proof that no training was lost."""
