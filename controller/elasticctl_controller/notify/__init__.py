"""News of jobs to webhooks: what is news, how it is worded, and the thread that sends it."""
