"""Processes that tests fork where the product would start Python: torch has been imported by then."""
