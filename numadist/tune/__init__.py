"""Which plan is best on this machine: measured."""
