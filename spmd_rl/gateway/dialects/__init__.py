"""Dialects of agents: requests read into one form, and answers written, whole and as streams."""
