"""Digests of weights, and the proof that both ends of a push have the same."""
