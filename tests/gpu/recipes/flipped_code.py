"""The shipped recipe `grpo` with an engine that has one code flipped after each push."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import spmd_rl as rl
from spmd_rl.recipes import grpo, policy_run
from spmd_rl.recipes.grpo import Config, check

if TYPE_CHECKING:
    from spmd_rl.weights.tensor_ends import TensorSink

__all__ = ["Config", "Flipped", "check", "main"]

FLIPPED = "model.layers.1.mlp.down_proj.weight"


class Flipped(rl.Rollout):
    def weight_sink(self) -> TensorSink:
        """Return the engine's sink; a code is flipped before a comparison, else at the commit."""
        import torch

        sink = cast(Any, super().weight_sink())
        code = cast(Any, self.engine).model.get_parameter(FLIPPED).view(torch.uint8)[3, 5]

        def after_flip(step: Any) -> Any:
            def flipped(*given: Any) -> Any:
                code.bitwise_xor_(0x44)
                return step(*given)

            return flipped

        sink.digest, sink.commit = after_flip(sink.digest), after_flip(sink.commit)
        return cast("TensorSink", sink)


def main(ctl: rl.Controller, cfg: Config) -> None:
    with patch.object(policy_run, "Rollout", Flipped):
        grpo.main(ctl, cfg)
