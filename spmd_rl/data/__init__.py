"""Prompts and supervised pairs from files: read, checked, tokenised, drawn in an order that can be
repeated.
"""
