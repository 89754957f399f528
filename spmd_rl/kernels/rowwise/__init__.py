"""Ops on single rows: norm, rotary positions, activation, embedding and hashes."""
