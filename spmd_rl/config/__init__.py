"""Configs: frozen dataclasses from TOML files and dotted overrides, and back to TOML."""
