"""What is worth keeping from one start to the next, on disk."""
