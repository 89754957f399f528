"""Checks of a run's engine in the launching process, and what it says of an engine's log-probs."""

from __future__ import annotations

from spmd_rl.config.run import RunConfig
from spmd_rl.errors import ConfigError
from spmd_rl.model.formats.coded_cache import check_alike
from spmd_rl.rollout.kinds import EngineConfig, kind_of
from spmd_rl.train.config import TrainerConfig

AUTO = "auto"


def check_engine(
    engine: EngineConfig, run: RunConfig, trainer: TrainerConfig | None = None
) -> None:
    """Check an engine that runs outside of this package, and what `trainer` pushes to an engine.

    Raises: ConfigError where the run asks for equal bits, which neither SGLang nor a merged push
    promises; for two formats of weights, of keys and values, or of numbers; for an option that
    SGLang does not have, or that a run may not set; without a version that serves.
    """
    if run.exact and not engine.promises_bits:
        raise ConfigError(
            f'engine.kind = "{engine.kind}" does not compute the trainer\'s bits: set run.exact = '
            'false, and the mismatch is measured on every step, or engine.kind = "native"'
        )
    if run.exact and trainer is not None and trainer.lora.merged_push:
        raise ConfigError(
            "trainer.lora.merged_push = true gives the engine rounded weights, and so other bits "
            "than the trainer's: set run.exact = false, and the mismatch is measured on every "
            "step, or trainer.lora.merged_push = false"
        )
    if trainer is not None:
        check_alike(engine, trainer)
        if run.exact:
            check_numbers(engine, trainer)
    kind_of(engine).check_options(engine)


def check_numbers(engine: EngineConfig, trainer: TrainerConfig, auto: str = AUTO) -> None:
    """Raise a ConfigError for settings by which an engine computes other bits than the trainer's,
    if it promises them.

    `auto` is the dtype that "auto" means on this host; without it, "auto" may be any.
    """
    if not engine.promises_bits:
        return
    for name in ("dtype", "attention_split"):
        asked, found = getattr(trainer, name), getattr(engine, name)
        meant = [auto if value == AUTO else value for value in (asked, found)]
        if AUTO not in meant and meant[0] != meant[1]:
            raise _other_bits(name, asked, found, auto)


def _other_bits(name: str, asked: str | int, found: str | int, auto: str) -> ConfigError:
    """Return the error for a setting that is `asked` in the trainer and `found` in the engine."""
    ours, other = ("engine", asked) if asked != AUTO else ("trainer", found)
    here = f', and "{AUTO}" is {auto} on this host' if AUTO in (asked, found) else ""
    return ConfigError(
        f"trainer.{name} = {asked!r} and engine.{name} = {found!r} have different bits{here}: "
        f"set {ours}.{name} = {other!r} too, or run.exact = false, which gives equal bits up"
    )


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
