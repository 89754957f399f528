"""The native engine's forward pass over a case: its own scheduler, cache, graphs and sampler.

Requests are submitted as a rollout submits them. The engine draws as always; then each token drawn
is replaced by the sample's token, which the same op scores. If the engine drew the sample's token
itself, the log-prob of that draw is kept. Nothing else is changed. Before each step the device is
told which rows of the case it computes, so a tap recorded in a CUDA graph knows whose outputs it
sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels import TokenAttention, sample_and_score
from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.replay.forward_pass import ForwardPass
from spmd_rl.microscope.replay.kv_provenance import KvProvenance
from spmd_rl.microscope.taps.hooks import hook_model
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import Tap
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.engine import Request
from spmd_rl.rollout.native.auto_sizes import choose_sizes
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.joint.joint_steps import ExpertRanks
from spmd_rl.rollout.native.replay import ReplayEngine, ReplayStep
from spmd_rl.rollout.native.tp.head_draw import Sampler

VERSION = 0
OWN_DRAWS = "log-probs of its own draw"
_FACTS = {  # counts of the engine, and their names in the report
    "num_steps": "steps",
    "num_graphs": "recorded graphs",
    "num_hit_tokens": "tokens from the prefix cache",
    "num_copied_tails": "copied pages",
    "num_partial_chunks": "cut prompts",
    "num_preemptions": "preemptions",
}


class EnginePass(ForwardPass):
    """The engine's side of a comparison.

    `wrap_attention` may replace a step's attention, and `sampler` its drawing and scoring.
    """

    name = "engine"
    rows_are_distinct = False
    model: CausalLM

    def __init__(
        self, model: CausalLM, cfg: NativeEngineConfig, experts: ExpertRanks | None = None
    ) -> None:
        """Where ranks share the model or its `experts`, all of them run it with the same case."""
        parameter = next(model.parameters())
        super().__init__(parameter.device, parameter.dtype)
        self.model, self.experts = model, experts
        self.cfg = replace(cfg, dtype=str(self.dtype).removeprefix("torch."))
        self.split = cfg.attention_split
        self.wrap_attention: Callable[[EngineReplay, TokenAttention], TokenAttention] = (
            lambda replay, attend: attend
        )
        self.sampler: Sampler = sample_and_score

    @torch.inference_mode()
    def run(self, case: ReplayCase, tap: Tap) -> None:
        replay = EngineReplay(self, case, tap)
        engine = replay.engine
        for request in requests(case):
            engine.submit(request)
        with replay.hooked():
            while engine.has_work:
                engine.step()
        rows, sources = replay.provenance.shared_rows()
        tap.fill_shared_rows(torch.from_numpy(rows), torch.from_numpy(sources))
        stats = engine.stats()
        self.facts = {label: stats[name] for name, label in _FACTS.items()}
        self.facts[OWN_DRAWS] = int(replay.is_own_draw.sum())
        self.problems = replay.provenance.problems


class EngineReplay:
    """One run of an engine over a case.

    The device holds the rows of the case that the present step computes, and those that it scores.
    """

    def __init__(self, engine_pass: EnginePass, case: ReplayCase, tap: Tap) -> None:
        self.engine_pass, self.case, self.tap = engine_pass, case, tap
        device = engine_pass.device
        self.engine = ReplayEngine(
            engine_pass.model,
            sized(engine_pass, case),
            device,
            sampler=self._sample,
            before_step=self._before_step,
            experts=engine_pass.experts,
        )
        self.engine.sink().commit(VERSION)
        self.provenance = KvProvenance(case, self.engine.num_pages, self.engine.page_size)
        self.step: ReplayStep | None = None
        self.is_own_draw = torch.zeros(case.num_rows + 1, dtype=torch.bool, device=device)
        self._numbers = {
            request_name(case, number): number for number in range(len(case.sequences))
        }
        self._padding_row = case.num_rows
        size = self.engine.max_forward_tokens
        self._rows, self._scored = torch.full((2, size), self._padding_row, device=device)
        self._tokens = torch.from_numpy(np.append(case.tokens, [0, 0])).to(device)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """While it is open, the tap observes every op of the engine."""
        model = self.engine_pass.model
        with ExitStack() as stack:
            stack.callback(model.register_forward_pre_hook(self._begin_forward).remove)
            stack.enter_context(hook_model(model, self.tap.observe))
            yield

    def _before_step(self, step: ReplayStep) -> None:
        """Tell the device whose tokens the next step computes."""
        self.step = step
        names = zip(step.uids.tolist(), step.indices.tolist(), strict=True)
        numbers = np.array([self._numbers[name] for name in names])
        computed = self.provenance.record_step(step, numbers)
        last = (np.cumsum(step.lengths) - 1)[step.samples]
        self._upload_rows(computed, self._rows)
        self._upload_rows(computed[last], self._scored)

    def _upload_rows(self, rows: NDArray[np.int64], target: Tensor) -> None:
        padded = np.full(len(target), self._padding_row)
        padded[: len(rows)] = rows
        target.copy_(upload(padded, target.device))

    def _begin_forward(self, model: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run before each forward pass, also before one that is being recorded."""
        tokens, positions, attend = args
        self.tap.begin_forward(self._rows[: len(tokens)], None, self._scored)
        return tokens, positions, self.engine_pass.wrap_attention(self, attend)

    def _sample(
        self, logits: Tensor, inv_temperature: Tensor, *rest: Any, **filters: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the sample's tokens, scored by the op that draws.

        Where that op draws the same token, the log-prob is the one of the draw.
        """
        sample = partial(self.engine_pass.sampler, logits, inv_temperature, *rest, **filters)
        drawn, own_logprobs = sample()
        scored = self._scored[: len(logits)]
        tokens = self._tokens.index_select(0, scored + 1)
        is_own_draw = drawn == tokens
        self.is_own_draw.index_copy_(0, scored, is_own_draw & (scored != self._padding_row))
        self.tap.skip_unobserved()
        logprobs = sample(given=tokens)[1]
        return tokens, self._observe_logprobs(torch.where(is_own_draw, own_logprobs, logprobs))

    def _observe_logprobs(self, logprobs: Tensor) -> Tensor:
        point = Point(self.engine_pass.model.spec.num_layers, "logprob")
        logprobs = self.tap.observe(point, logprobs)
        return logprobs.nan_to_num()  # NaN would end the engine before it is traced


def request_name(case: ReplayCase, number: int) -> tuple[int, int]:
    """Return (uid, index) of a sequence's request, which its draws depend on."""
    return case.sequences[number].drawn_as or (number, 0)


def requests(case: ReplayCase) -> Iterator[Request]:
    """Yield requests as a rollout submits them; each ends with its sample's last token.

    Log-probs are compared over the whole vocabulary, whatever was filtered.
    """
    for number, sequence in enumerate(case.sequences):
        sampling = replace(
            sequence.sampling,
            max_tokens=len(sequence.response),
            ignore_eos=True,
            stop=(),
            stop_ids=(),
            replay_filters=False,
            replay_routes=False,
        )
        name, prompt = request_name(case, number), sequence.prompt.astype(np.int32)
        yield Request(*name, prompt, sampling, seed=sequence.seed)


def sized(path: EnginePass, case: ReplayCase) -> NativeEngineConfig:
    """Return the config, with just enough pages for `case` if it leaves their number open."""
    if path.cfg.num_pages:
        return path.cfg
    page_size = choose_sizes(path.cfg, path.model.spec, path.device).page_size
    one_more = len(case.sequences)  # an admission leaves a page for each running row
    return replace(path.cfg, num_pages=int((-(-case.lengths // page_size)).sum()) + one_more)
