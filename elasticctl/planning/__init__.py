"""The policy for goals: which workers to have now, so that a job meets its deadline and budget at the lowest cost."""
