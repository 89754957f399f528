"""Where two forward passes part, and which known cause explains it."""
