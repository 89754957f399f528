"""Training with Megatron-core: tensor, pipeline, context and expert parallelism."""
