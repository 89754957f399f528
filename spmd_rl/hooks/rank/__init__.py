"""Pool of a rank's hooks: it starts the processes that run them, and sends them calls."""
