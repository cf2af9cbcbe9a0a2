"""How many workers each job gets when jobs share a cluster. Pure, so that it can be simulated and tested by itself.

`claims` builds the input from jobs, nodes and quotas; `grant_workers` is the entry point. `allocation` decides how many
workers each job gets, `packing` which nodes they fit on, and which workers have to leave, for which job. `kueue` is for
jobs that leave all that to Kueue: what is requested from it, and what its answer means for the job.
"""
