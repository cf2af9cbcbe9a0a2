"""How long training stops when something happens to a worker: with elasticctl, torchrun and torchft."""
