"""Buckets that pass through memory which two processes share."""
