"""Which splits of an operator are valid, found by running it on shards."""
