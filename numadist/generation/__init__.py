"""Generation with a sharded KV cache: numadist.generate, numadist.Generator and its engine."""
