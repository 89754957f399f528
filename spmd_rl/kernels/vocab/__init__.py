"""Ops over the vocabulary: language-model head, log-probabilities and sampling."""
