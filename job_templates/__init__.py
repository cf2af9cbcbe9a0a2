"""The shipped job templates; `elasticctl.api.manifests` finds them here as package data."""
