"""Settings of a trainer that do not go together. No torch."""

from __future__ import annotations

import operator

from spmd_rl.config.combinations import (
    ANY,
    OFF,
    ON,
    Combination,
    above,
    compared,
    equal,
    other_than,
)
from spmd_rl.model.formats.coded_cache import CACHE_REFUSED

NEEDS_FSDP2 = "{1}: expected 'fsdp2' with "
NEEDS_ADAMW = "{1}: expected 'adamw' with "
# what does not go together in a trainer, with keys as in its table
REFUSED = (
    Combination(
        {"router_aux_loss_coef": ON, "backend.kind": other_than("fsdp2")},
        NEEDS_FSDP2 + "{0.key}: Megatron-core is not given that loss",
    ),
    Combination(
        {"lora.rank": ON, "optimizer.kind": other_than("adamw")},
        NEEDS_ADAMW + "{0.key}: other optimizers are not for adapters",
    ),
    Combination(
        {"lora.rank": ON, "backend.kind": other_than("fsdp2")},
        NEEDS_FSDP2 + "{0.key}: Megatron-core is not given adapters here",
    ),
    Combination(
        {"lora.rank": ON, "backend.offload": other_than("none")},
        "{1}: expected 'none' with {0.key}: the moments of adapters are small",
    ),
    Combination(
        {"lora.rank": ON, "freeze": ON},
        "{1}: expected () with {0.key}: lora.targets says what is trained",
    ),
    Combination(
        {"weights": other_than("full"), "lora.merged_push": ON},
        "{1}: expected false with weights in codes: merged weights would be rounded once more",
    ),
    Combination(
        {"data_parts": ON, "deterministic": OFF},
        "{1}: expected true with {0.key}",
    ),
    Combination({"data_parts": ON, "backend.kind": other_than("fsdp2")}, NEEDS_FSDP2 + "{0.key}"),
    Combination(
        {"data_parts": ON, "optimizer.kind": equal("adamw8bit")},
        "{1}: expected 'adamw' or 'muon' with {0.key}: moments in 8 bits depend on a rank's shard",
    ),
    Combination(
        {"weights": other_than("full"), "backend.kind": other_than("fsdp2")},
        NEEDS_FSDP2 + "weights in codes: Megatron-core does not compute with them",
    ),
    Combination(
        {"cache": other_than("full"), "backend.kind": other_than("fsdp2")},
        NEEDS_FSDP2 + "{0}: Megatron-core does not round the keys and values of its attention",
    ),
    Combination(
        {"backend.kind": equal("megatron"), "optimizer.kind": other_than("adamw")},
        NEEDS_ADAMW + "{0}: the others are built for 'fsdp2' alone",
    ),
    Combination(
        {"backend.kind": equal("megatron"), "freeze": ON},
        "{1}: expected () with {0}: 'fsdp2' can freeze parameters",
    ),
    Combination(
        {"backend.kind": equal("megatron"), "attention_split": ON},
        "{1}: expected 0 with {0}: 'fsdp2' has it",
    ),
    Combination(
        {"backend.offload": other_than("none"), "optimizer.kind": other_than("adamw")},
        NEEDS_ADAMW + "{0.key}: its update is elementwise, so it can be streamed in chunks, "
        "whereas Muon updates whole matrices, and moments in 8 bits belong to torchao",
    ),
    Combination(
        {
            "schedule": other_than("constant"),
            "total_steps": compared("no more than", "warmup_steps", operator.le),
            "warmup_steps": ANY,
        },
        "{1}: expected more than {2} for the schedule {0.value!r}, such as the steps of the run "
        "times minibatches",
    ),
    *CACHE_REFUSED,
)
REFUSED_IN_FSDP2 = (
    Combination(
        {"offload_activations": ON, "recompute": equal("cheap")},
        "{1}: expected 'all' or 'none' with {0.key}: what 'cheap' computes again needs its inputs "
        "on the GPU",
    ),
)
HEAD_REFUSED = (
    Combination(
        {"trainer.lora.rank": ON, "model.head": equal("value")},
        "lora.rank is set for a model with a value head, which would not be trained: adapters are "
        "for language models, so set it to 0",
    ),
)
# and in it with the ranks of FSDP2, with tables of a run as keys
MIXTURE = {"model.num_experts": above(0)}  # whose experts ranks along tp share too
DEEP_EP_SIZES = (2, 4, 8)  # ranks of a host between which DeepEP has kernels
AXES_REFUSED = (
    Combination(
        {
            "trainer.backend.ep_dispatcher": equal("deep_ep"),
            "split.train.ep": other_than(1, *DEEP_EP_SIZES),
        },
        '{1}: {0.key} = "{0.value}" is for ' + f"{', '.join(map(str, DEEP_EP_SIZES))} ranks",
    ),
    *(
        Combination(
            {f"split.train.{axis}": above(1), f"trainer.{key}": condition},
            f"{{0}} does not go with {{1}}: {reason}",
        )
        for axis, key, condition, reason in (
            ("ep", "optimizer.kind", other_than("adamw"), "other optimizers need whole layers"),
            ("ep", "backend.wrap", equal("model"), "experts are units of their own"),
            ("ep", "backend.offload", equal("master"), "master weights stay awake"),
            ("tp", "lora.rank", ON, "ranks that share matrices have no adapters"),
            ("tp", "weights", other_than("full"), "ranks share weights in 16 or 32 bits alone"),
            ("tp", "optimizer.kind", other_than("adamw"), "other optimizers need whole matrices"),
            (
                "cp",
                "router_aux_loss_coef",
                ON,
                "that loss needs all tokens of a sequence on one rank",
            ),
        )
    ),
    *(
        Combination(
            {"split.train.tp": above(1), f"trainer.{key}": equal(value)} | MIXTURE,
            f"{{0}} does not go with {{1}}: {reason}",
        )
        for key, value, reason in (
            ("backend.wrap", "model", "experts are units of their own"),
            ("backend.offload", "master", "master weights stay awake"),
        )
    ),
    *(
        Combination(
            {key: above(1), "model.whole_layers": ON, "model": ON},
            "{0} does not go with {2}, which has {1.value}: set {0.key} = 1, as ranks do not share "
            "them",
        )
        for key in ("split.train.tp", "split.train.cp", "run.row_shards")
    ),
    Combination(
        {"trainer.deterministic": ON, "split.train.dp": above(1)},
        "{0.key}: gradients of {1.value} replicas are summed in an order of NCCL's or gloo's own; "
        "set {1.key} = 1",
    ),
    *(
        Combination(
            {"trainer.backend.offload": equal("master"), f"split.train.{axis}": above(1)},
            "{0} needs one shard, and there are {1.value}: with more, weights are gathered from "
            "the master weights in each step, so they must be awake; set it to 'moments'",
        )
        for axis in ("fsdp", "cp")
    ),
    Combination(
        {"run.row_shards": above(1), "trainer.weights": other_than("full")},
        "{0} does not go with {1}, whose products have one part: set it to 'full'",
    ),
    *HEAD_REFUSED,
)
# with a model that transformers computes, whatever backend and role
FOREIGN = "{1} does not go with a model that transformers computes: "
FOREIGN_REFUSED = tuple(
    Combination({"model.impl": equal("transformers"), key: condition}, FOREIGN + advice)
    for key, condition, advice in (
        ("trainer.backend.kind", other_than("fsdp2"), "set it to 'fsdp2'"),
        ("trainer.backend.recompute", equal("cheap"), "set it to 'all' or 'none'"),
        ("trainer.backend.offload_activations", ON, "set it to false"),
        ("trainer.optimizer.kind", equal("muon"), "set it to 'adamw'"),
        ("trainer.lora.rank", ON, "set it to 0, as adapters are for our own networks"),
        ("trainer.weights", other_than("full"), "set it to 'full'"),
        ("trainer.cache", other_than("full"), "set it to 'full'"),
        ("trainer.attention_split", ON, "set it to 0"),
        ("trainer.deterministic", ON, "set it to false, as its kernels are not ours"),
        *(
            (f"split.train.{axis}", above(1), "set it to 1, as ranks do not share its layers")
            for axis in ("tp", "cp", "ep")
        ),
        ("run.row_shards", above(1), "set it to 1"),
        ("sampling.replay_routes", ON, "set it to false"),
        ("model.head", equal("value"), "value heads are for our own networks"),
    )
)
