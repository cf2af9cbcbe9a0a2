"""What checkpoints cost: `Checkpointer` next to torch.save, DCP and others, on the same S3 server."""
