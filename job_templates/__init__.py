"""The shipped job templates; `elasticctl.manifests` finds them here as package data."""
