"""Callbacks through which other frameworks keep their state here: one module each, which imports its framework."""
