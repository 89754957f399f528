"""Graders that check whether a response follows its instructions."""
