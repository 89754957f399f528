"""Checks of a host before a run: facts about it, and findings with a fix."""
