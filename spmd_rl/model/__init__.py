"""The network of trainer and engine, and its Hugging Face folders."""
