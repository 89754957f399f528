"""Replay of given tokens through the engine, the trainer and transformers."""
