"""Diagnosis: where two forward passes differ, and which known cause explains it."""
