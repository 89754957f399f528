"""Ops of mixtures of experts: the choice of experts, and what they give each token."""
