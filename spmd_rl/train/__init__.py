"""The Trainer role: a backend that computes gradients, and the train step above it."""
