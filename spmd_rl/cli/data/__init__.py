"""`spmd-rl data`: convert, check and describe data files."""
