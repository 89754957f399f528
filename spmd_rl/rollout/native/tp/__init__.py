"""Engines whose model several ranks share: the first decides, and the others follow it."""
