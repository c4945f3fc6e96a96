"""What the machine is."""
