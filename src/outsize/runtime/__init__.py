"""Training under a plan on torch.distributed."""
