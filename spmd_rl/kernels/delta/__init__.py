"""Ops of the gated delta rule: convolution, gates, recurrence and the norm of its output."""
