"""Prompts and supervised pairs: read from files, checked, tokenised, drawn in a fixed order."""
