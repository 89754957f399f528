"""Packages that settings of a trainer need, and the words to install them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from spmd_rl.errors import ConfigError
from spmd_rl.train.config import TrainerConfig


@dataclass(frozen=True)
class Package:
    """A package that a setting needs, and what to do where it is missing."""

    setting: str
    name: str
    module: str
    remedy: str

    def missing(self, why: object) -> ConfigError:
        """Return the error for a run whose Python cannot import it."""
        return ConfigError(
            f"{self.setting} needs {self.name}, which cannot be imported ({why}): {self.remedy}"
        )

    def require(self) -> None:
        """Raise a ConfigError unless Python finds it. It is not imported, which takes seconds."""
        if find_spec(self.module) is None:
            raise self.missing(f"there is no module {self.module}")


MEGATRON = Package(
    "trainer.backend.kind = 'megatron'",
    "megatron-core",
    "megatron",
    "pip install -e '.[megatron]' in the repository of spmd_rl",
)
TRANSFORMER_ENGINE = Package(
    "trainer.backend.layers = 'transformer_engine'",
    "transformer-engine",
    "transformer_engine",
    "pip install --no-build-isolation -e '.[te]' in the repository of spmd_rl, or set it to "
    "'local'",
)
TORCHAO = Package(
    "trainer.optimizer.kind = 'adamw8bit'",
    "torchao",
    "torchao",
    "pip install -e '.[torchao]' in the repository of spmd_rl, or set the kind to 'adamw'",
)

DEEP_EP = Package(
    'trainer.backend.ep_dispatcher = "deep_ep"',
    "tokenspeed-deepep",
    "deep_ep",
    "pip install -e '.[deep_ep]' in the repository of spmd_rl, or set it to \"torch\"",
)


def check_packages(cfg: TrainerConfig) -> None:
    """Check that this Python has the packages that a trainer needs, as its ranks will.

    Raises: ConfigError, with the words to install the first that is missing.
    """
    if cfg.backend.kind == "megatron":
        MEGATRON.require()
        if cfg.backend.layers == "transformer_engine":
            TRANSFORMER_ENGINE.require()
    if cfg.optimizer.kind == "adamw8bit":
        TORCHAO.require()
    if cfg.backend.ep_dispatcher == "deep_ep":
        DEEP_EP.require()
