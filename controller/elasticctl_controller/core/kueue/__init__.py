"""Jobs that Kueue admits: what is asked of it, what its answer means for the job, and what it is told."""
