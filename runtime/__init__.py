"""What a rank executes. Knows torch.distributed; never a plan, never the solver."""
