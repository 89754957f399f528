"""Algorithms by name: each file has a formula, its source, and a function from settings to an
`Algorithm`.
"""
