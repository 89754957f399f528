"""Settings of `spmd-rl serve`."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal

from spmd_rl.config.rules import require
from spmd_rl.config.schema import KEYS
from spmd_rl.errors import ConfigError
from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig

KEY_VARIABLE = "SPMD_RL_SERVE_KEY"


@dataclass(frozen=True)
class ServeConfig:
    """What is served, where, and to whom."""

    port: int = 0  # to listen at; 0: a free one, which is printed
    # that clients must send; "": that of SPMD_RL_SERVE_KEY, and without one any client of this
    # host may ask
    key: str = ""
    name: str = ""  # of the model for clients; "": the name of the folder
    step: str = ""  # of a run: the checkpoint after this step, or best; "": the newest
    role: str = ""  # of a checkpoint with several trainers: which one
    model: str = ""  # of a run: where config and tokenizer come from; "": the run's model
    device: Literal["", "cpu", "cuda"] = ""  # "": a GPU where there is one
    seed: int = 0  # of the draws
    # where a client says nothing else; those of the run, if it is one
    sampling: SamplingConfig = field(
        default_factory=SamplingConfig,
        metadata={KEYS: ("temperature", "top_p", "top_k", "min_p", "stop", "stop_ids")},
    )
    engine: NativeEngineConfig = field(default_factory=NativeEngineConfig)
    gateway: GatewayConfig = field(default_factory=lambda: GatewayConfig(max_waiting=1024))

    def __post_init__(self) -> None:
        require(0 <= self.port < 1 << 16, "port", self.port, "0 (a free one) to 65535")
        require(0 <= self.seed < 1 << 63, "seed", self.seed, "in [0, 2^63)")
        if not self.key and not ip_address(self.gateway.host).is_loopback:
            raise ConfigError(
                f"gateway.host = {self.gateway.host!r} is not of this machine alone: clients need "
                f"a key, which --key or {KEY_VARIABLE} says"
            )
