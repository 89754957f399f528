"""Graders that ask a server or a judge."""
