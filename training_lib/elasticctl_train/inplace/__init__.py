"""Training goes on in the same processes when the group changes: nobody starts again, and no step is lost.

docs/recovery.md describes the protocol.
"""
