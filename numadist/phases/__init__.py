"""Plans of threads for reading prompts and for decoding, and switching between them."""
