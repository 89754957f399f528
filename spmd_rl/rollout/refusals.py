"""Settings of an engine that do not go together, or not with those of a run. No torch."""

from __future__ import annotations

from spmd_rl.config.combinations import (
    ANY,
    OFF,
    ON,
    Combination,
    Condition,
    above,
    compared,
    equal,
    other_than,
)
from spmd_rl.model.formats.coded_cache import FORMATS

AUTO = "auto"
HOST_DTYPE = "host.dtype"  # what "auto" means on this host
SGLANG = 'engine.kind = "sglang"'
GIVEN_UP = "or run.exact = false, which gives equal bits up"
WHOLE_PUSH = "trainer.lora.merged_push = true, so that a push brings whole weights"
ADAPTERS = {"trainer.lora.rank": ON, "trainer.lora.merged_push": OFF}


def _differs(key: str, *but: str) -> Condition:
    """The setting is not that of `key`, and neither is one of `but`."""
    return compared(
        "other than",
        key,
        lambda value, other: value != other and value not in but and other not in but,
    )


MERGED = Combination(
    {"run.exact": ON, "trainer.lora.merged_push": ON},
    "{1.key} = true gives the engine rounded weights, and so other bits than the trainer's: set "
    "{0.key} = false, and the mismatch is measured on every step, or {1.key} = false",
)
# an engine that ranks share, or that sums as if they did
IN_PARTS = tuple(
    row
    for key in ("split.infer.tp", "run.row_shards")
    for row in (
        Combination(
            {key: above(1), "engine.weights": other_than("full")},
            "{0} does not go with {1}: ranks share weights in 16 or 32 bits alone, so set it to "
            "'full'",
        ),
        Combination(
            {key: above(1)} | ADAPTERS,
            "{0} does not go with adapters that are pushed alone: set " + WHOLE_PUSH,
        ),
    )
)
FOREIGN = Combination(
    {"model.impl": equal("transformers"), "engine.kind": other_than("plain")},
    "{1} does not compute a model of transformers: set it to 'plain'",
)
NATIVE_REFUSED = (
    FOREIGN,
    MERGED,
    *(
        Combination(
            {f"engine.{name}": _differs(f"trainer.{name}"), f"trainer.{name}": ANY},
            "{0} and {1} are different formats, whose log-probs differ: set both alike",
        )
        for name in FORMATS
    ),
    *(
        Combination(
            {
                f"trainer.{name}": _differs(f"engine.{name}", AUTO),
                f"engine.{name}": ANY,
                "run.exact": ON,
            },
            "{0} and {1} have different bits: set {1.key} = {0.value!r} too, " + GIVEN_UP,
        )
        for name in ("dtype", "attention_split")
    ),
    *(
        Combination(
            {
                f"{auto}.dtype": equal(AUTO),
                HOST_DTYPE: _differs(f"{other}.dtype"),
                f"{other}.dtype": other_than(AUTO),
            },
            f'{pair} have different bits, and "auto" is {{1.value}} on this host: set {{0.key}} = '
            "{2.value!r} too, " + GIVEN_UP,
        )
        for auto, other, pair in (
            ("trainer", "engine", "{0} and {2}"),
            ("engine", "trainer", "{2} and {0}"),
        )
    ),
    *IN_PARTS,
    Combination(
        {"split.infer.tp": above(1), "model.whole_layers": ON, "model": ON},
        "{0} does not go with {2}, which has {1.value}: set {0.key} = 1, as ranks do not share "
        "them",
    ),
    Combination(
        {"split.infer.ep": above(1), "split.infer.tp": above(1)},
        "{0} does not go with {1}, whose ranks share experts too: set ep to 1",
    ),
    Combination(
        {"split.infer.ep": above(1)} | ADAPTERS,
        "{0} does not go with adapters that are pushed alone: set " + WHOLE_PUSH,
    ),
)
SGLANG_REFUSED = (
    FOREIGN,
    Combination(
        {"run.exact": ON},
        SGLANG + " does not compute the trainer's bits: set {0.key} = false, and the mismatch is "
        'measured on every step, or engine.kind = "native"',
    ),
    MERGED,
    Combination(
        ADAPTERS,
        SGLANG + " takes no adapters: set " + WHOLE_PUSH + ', or engine.kind = "native"',
    ),
    *(
        Combination(
            {f"trainer.{name}": other_than(full)},
            '{0} is for engine.kind = "native": SGLang has its weights, keys and values in '
            f"bfloat16 here; set {{0.key}} = {full!r}",
        )
        for name, full in zip(FORMATS, ("full", "full", (0, 0)), strict=True)
    ),
    Combination(
        {"model": ON, "model.whole_layers": ON},
        "{0} has {1.value}, which engine.kind = 'sglang' does not support here: set engine.kind = "
        "'native'",
    ),
    Combination(
        {"model": ON, "model.corrections": ON},
        "{0.value} has routers with corrections, which engine.kind = 'sglang' does not support "
        "here: set engine.kind = 'native'",
    ),
)
PLAIN_REFUSED = (
    Combination(
        {"model.impl": equal("native"), "engine.kind": equal("plain")},
        "{1} is for models that transformers computes: set it to 'native', or name the model as "
        "transformers:PATH",
    ),
)
