"""Where checkpoints live, chosen by URL."""
