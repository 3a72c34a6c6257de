"""One family a file: config, blocks, model, variants, checkpoint rules, sharding rules. Long tables stand beside it."""
