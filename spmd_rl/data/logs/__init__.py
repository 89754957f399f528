"""Conversations in the forms of other programs: one module a format, read and written."""
