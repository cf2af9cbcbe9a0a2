"""A job on spot machines of Karpenter, and everything that happens to such machines."""
