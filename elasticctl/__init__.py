"""elasticctl: elastic PyTorch training on spot GPUs, from a laptop to any cloud."""

__version__ = "0.1.0"
