"""One family a file: config, blocks, model, variants, checkpoint rules, sharding rules."""
