"""Hostile input for everything that reads what others wrote: `targets` says which, `soak` runs millions."""
