"""From what a user says about a job to its manifest: flags, `JobRequest`, `JobSpec`, manifest."""
