"""Which processes are alive, what they owe each other, and how a run ends."""
