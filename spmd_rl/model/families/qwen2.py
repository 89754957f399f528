"""Qwen2.5: a dense layer whose queries, keys and values have a bias, cut as their weights are."""

from spmd_rl.model.families.dense import dense_rules
from spmd_rl.model.families.family import Family

QWEN2 = Family(dense_rules)
