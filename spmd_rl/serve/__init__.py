"""`spmd-rl serve`: the endpoints of the gateway over one engine, for a model or a checkpoint."""
