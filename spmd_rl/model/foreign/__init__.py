"""Models of families that are not ours, which `transformers` computes (docs/models.md).

names.py      `transformers:PATH`, the name of such a model; no torch
spec.py       its specification, made of the network of transformers
network.py    that network, with the contract of `model.network.CausalLM`
scorer.py     log-probs of packed sequences from it
weights.py    its first weights, and the folder that it is written to
"""
