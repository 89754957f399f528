"""Generation: the engine protocol, the native engine, and the role that serves it."""
