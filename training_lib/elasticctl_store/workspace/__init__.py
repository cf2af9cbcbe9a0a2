"""A job's workspace: its format, how it is stored, and how a worker gets it.

Needs no torch, because the command line sends what a launcher unpacks.
"""
