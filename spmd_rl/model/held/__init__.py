"""Which part of each parameter of a model a rank holds. No torch."""
