"""Replaying known tokens through the engine, the trainer and transformers."""
