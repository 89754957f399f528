"""Memory of each role in each phase: how much it is, and how an engine gives it back."""
