"""The launcher: starts, stops and restarts the ranks of one worker, on torch.distributed.elastic.

Needs nothing of the training library beside it, and runs scripts that do not use it.
"""
