"""The folder that goes along with a job: what is in it, how it is kept in storage, how a worker gets it.

Needs no torch, because the command line sends what a launcher unpacks.
"""
