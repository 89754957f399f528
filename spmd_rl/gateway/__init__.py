"""Endpoints for agents that speak HTTP: they draw exact tokens from the policy of an episode."""
