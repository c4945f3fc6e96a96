"""Backend "numa" of torch.distributed: groups of ranks that reduce through shared memory."""

# What init_process_group and new_group call us.
BACKEND = "numa"
