"""The comparison harness: variants of one model, in turn, in processes of their own."""
