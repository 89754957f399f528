"""One network for trainer and engine, and the Hugging Face folders it comes from and goes to."""
