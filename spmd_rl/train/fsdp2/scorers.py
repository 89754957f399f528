"""Scorers of models on the meta device, as the settings of their roles say."""

from __future__ import annotations

import torch

from spmd_rl.config.combinations import refuse
from spmd_rl.model.formats.coded_cache import kv_exponents
from spmd_rl.model.lora import NO_LORA, LoraConfig
from spmd_rl.model.network import CausalLM
from spmd_rl.model.parts.part import ModelPart
from spmd_rl.model.scorer import Scorer
from spmd_rl.model.spec import Head, ModelSpec
from spmd_rl.model.value_head import ValueModel, ValueScorer
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from spmd_rl.train.refusals import FOREIGN_REFUSED


def new_scorer(
    spec: ModelSpec,
    model: str,
    cfg: TrainerConfig | FrozenConfig,
    head: Head,
    part: ModelPart,
    lora: LoraConfig = NO_LORA,
    recomputes: bool = False,
) -> Scorer | ValueScorer:
    """Return the module that computes what the head gives, of the specification or, where
    `transformers` computes it, of the `model` of this name.
    Raises: ConfigError for a value head of such a model.
    """
    refuse(FOREIGN_REFUSED, {"model.impl": spec.impl, "model.head": head})
    if spec.impl == "transformers":
        from spmd_rl.model.foreign.network import ForeignLM
        from spmd_rl.model.foreign.scorer import ForeignScorer

        return ForeignScorer(ForeignLM(spec, model), cfg.logit_rows)
    with torch.device("meta"):
        if head == "value":
            return ValueScorer(ValueModel(spec, kv_exponents(cfg), part), cfg.attention_split)
        network = CausalLM(spec, lora, kv_exponents(cfg), part)
        return Scorer(network, cfg.logit_rows, recomputes, cfg.attention_split)
