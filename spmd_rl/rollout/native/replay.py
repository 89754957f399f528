"""Public hook for tools that follow a native engine: each step is shown before it is launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import InFlightStep, NativeEngine
from spmd_rl.rollout.native.joint.joint_steps import ExpertRanks
from spmd_rl.rollout.native.model_runner import ModelRunner
from spmd_rl.rollout.native.prefill_graphs import PREFILL_SIZES
from spmd_rl.rollout.native.step_plan import StepPlan
from spmd_rl.rollout.native.tp.head_draw import Sampler


@dataclass(frozen=True)
class ReplayStep:
    """A step about to be launched, told by requests: request b is (uids[b], indices[b]).

    It computes tokens `starts[b] : starts[b] + lengths[b]`, and samples the next one if
    `samples[b]`. Page `source` is copied over page `target` before it, for each pair of
    `copies_before`.
    Shape: all [B], but pages [B, P].
    """

    uids: NDArray[np.int64]
    indices: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    samples: NDArray[np.bool_]
    pages: NDArray[np.int64]
    copies_before: tuple[tuple[int, int], ...] = ()


class ReplayEngine(NativeEngine):
    """A native engine that calls `before_step` with each step, and samples with `sampler`."""

    def __init__(
        self,
        model: CausalLM,
        cfg: NativeEngineConfig,
        device: torch.device,
        *,
        sampler: Sampler,
        before_step: Callable[[ReplayStep], None],
        experts: ExpertRanks | None = None,
    ) -> None:
        super().__init__(model, cfg, device, sampler=sampler, experts=experts)
        self._before_step = before_step

    @property
    def num_pages(self) -> int:
        return self.sizes.num_pages

    @property
    def page_size(self) -> int:
        return self.sizes.page_size

    @property
    def max_forward_tokens(self) -> int:
        """The most tokens that one forward pass takes, with the padding of recorded graphs."""
        return max(self.sizes.max_step_tokens, self.cfg.max_batch, *PREFILL_SIZES)

    def _launch(
        self, plan: StepPlan, samples: NDArray[np.bool_], runner: ModelRunner, version: int
    ) -> InFlightStep:
        step = ReplayStep(
            uids=self.table.uid[plan.rows],
            indices=self.table.index[plan.rows],
            starts=plan.starts,
            lengths=plan.lengths,
            samples=samples,
            pages=self.table.pages[plan.rows],
            copies_before=tuple(plan.copies_before),
        )
        self._before_step(step)
        return super()._launch(plan, samples, runner, version)
