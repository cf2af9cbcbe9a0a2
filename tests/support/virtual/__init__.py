"""A cluster in virtual time: the real controller, service and launcher states over a simulated world (see `story`)."""
