"""The way from a model to what a rank runs: numadist.plan, numadist.explain, numadist.shard."""
