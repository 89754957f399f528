"""Curves as pictures: what is drawn where, and in which colour."""
