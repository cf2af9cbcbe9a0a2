"""The shipped job templates; `elasticctl.templates` finds them here as package data."""
