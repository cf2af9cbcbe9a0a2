"""How many workers of which kind to have now, so that a job is done in time, within its budget, for the least."""
