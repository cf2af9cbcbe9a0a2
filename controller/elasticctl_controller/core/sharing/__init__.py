"""Who gets how many workers when jobs share a cluster. Pure, so that it can be simulated and tested by itself.

`claims` builds the input from jobs, nodes and quotas; `grant_workers` is the entry point. `division` decides how many
workers each job gets, `packing` on which nodes they fit, `preemption` which workers have to go and for whom.
`kueue` is for jobs that leave all that to Kueue: what is asked of it, and what its answer means for the job.
"""
