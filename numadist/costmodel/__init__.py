"""What an op costs on a machine, from a profile of it."""
