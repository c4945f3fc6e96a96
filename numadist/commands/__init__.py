"""`numadist COMMAND`: a file a command."""
