"""A job's workspace: what the folder consists of, how it is stored, how a worker gets it.

Needs no torch, because the command line sends what a launcher unpacks.
"""
