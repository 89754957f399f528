"""Checks of a run's engine in the launching process, and what it says of an engine's log-probs."""

from __future__ import annotations

from spmd_rl.config.run import RunConfig
from spmd_rl.errors import ConfigError
from spmd_rl.rollout.engine import NativeEngineConfig
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.options import check_options

EngineConfig = NativeEngineConfig | SglangEngineConfig


def check_engine(engine: EngineConfig, run: RunConfig) -> None:
    """Check an engine that runs outside of this package. The native one has nothing to check.

    Raises: ConfigError where the run asks for equal bits, which SGLang does not promise; for an
    option that SGLang does not have, or that a run may not set; without a version that serves.
    """
    if not isinstance(engine, SglangEngineConfig):
        return
    if run.exact:
        raise ConfigError(
            'engine.kind = "sglang" does not compute the trainer\'s bits: set run.exact = false, '
            'and the mismatch is measured on every step, or engine.kind = "native"'
        )
    check_options(engine)


def announce_correction(engine: EngineConfig, correction: str) -> None:
    """Print how a recipe corrects for log-probs that an engine computes in another way.

    `correction` is a clause such as "none". The native engine's log-probs need none.
    """
    if isinstance(engine, SglangEngineConfig):
        print(
            "engine.kind = sglang: its log-probs are not the trainer's bits; every step measures "
            f"onpolicy/mean_abs_dlogp and onpolicy/max_abs_dlogp; correction: {correction}",
            flush=True,
        )
