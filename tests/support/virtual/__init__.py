"""A cluster in virtual time: the real controller, service and launcher states in a simulated world; see `scenario`."""
