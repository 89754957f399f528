"""Graders that compare a response's answer with the record's."""
