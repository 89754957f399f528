"""Messages between a rank and a process of hooks."""
