"""Keeps ranks in their processes when the group changes: no process restarts, and no completed step is lost.

docs/recovery.md describes the protocol.
"""
