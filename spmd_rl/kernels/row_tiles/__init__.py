"""Tiles of attention's rows, of which each program of a kernel takes one."""
