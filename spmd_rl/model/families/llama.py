"""Llama 3: a dense layer without biases."""

from spmd_rl.model.families.dense import dense_rules
from spmd_rl.model.families.family import Family

LLAMA = Family(dense_rules)
