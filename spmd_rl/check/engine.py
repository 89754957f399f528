"""Checks of a run's engine in the launching process, and what it says of an engine's log-probs."""

from __future__ import annotations

from spmd_rl.config.combinations import refuse
from spmd_rl.config.run import RunConfig
from spmd_rl.rollout.kinds import EngineConfig, kind_of
from spmd_rl.train.config import TrainerConfig


def check_engine(
    engine: EngineConfig, run: RunConfig, trainer: TrainerConfig | None = None
) -> None:
    """Check an engine that runs outside of this package, and what `trainer` pushes to an engine.

    Raises: ConfigError where the run asks for equal bits, which neither SGLang nor a merged push
    promises; for two formats of weights, of keys and values, or of numbers; for an option that
    SGLang does not have, or that a run may not set; without a version that serves.
    """
    kind = kind_of(engine)
    refuse(kind.refused, {"engine": engine, "run": run, "trainer": trainer})
    kind.check_options(engine)


def announce_correction(
    engine: EngineConfig, correction: str, trainer: TrainerConfig | None = None
) -> None:
    """Print how a recipe corrects for log-probs that an engine computes in another way, or with
    the weights of a merged push.

    `correction` is a clause such as "none". Other log-probs need none.
    """
    causes = [] if engine.promises_bits else [f"engine.kind = {engine.kind}"]
    if trainer is not None and trainer.lora.merged_push:
        causes.append("trainer.lora.merged_push = true")
    if causes:
        print(
            f"{', '.join(causes)}: the engine's log-probs are not the trainer's bits; every step "
            "measures onpolicy/mean_abs_dlogp and onpolicy/max_abs_dlogp; "
            f"correction: {correction}",
            flush=True,
        )
