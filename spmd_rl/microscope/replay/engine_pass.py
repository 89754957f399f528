"""The native engine itself over a case: its scheduler, cache, graphs and drawing, with every token
known in advance.

Requests go in as a rollout submits them. The engine draws as ever, and what it draws is replaced by
the sample's token, which the same op scores: in rows where it was drawn as well, the log-prob is
the one that came with the draw. Nothing else is changed: before each step its rows are told to the
device, so that a tap recorded in a CUDA graph knows whose outputs it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmd_rl.kernels import TokenAttention, sample_and_score
from spmd_rl.kernels.runtime.upload import upload
from spmd_rl.microscope.replay.case import Case
from spmd_rl.microscope.replay.kv_provenance import KvProvenance
from spmd_rl.microscope.taps.hooks import watch
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import Tap
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.engine import NativeEngineConfig, Request
from spmd_rl.rollout.native.auto_sizes import choose_sizes
from spmd_rl.rollout.native.decode_graphs import Sampler
from spmd_rl.rollout.native.replay import ReplayEngine, ReplayStep

VERSION = 0
OWN_DRAWS = "log-probs of its own draw"
_COUNTS = {  # of the engine's own, by what the report calls them
    "num_steps": "steps",
    "num_graphs": "recorded graphs",
    "num_hit_tokens": "tokens from the prefix cache",
    "num_copied_tails": "copied pages",
    "num_partial_chunks": "cut prompts",
    "num_preemptions": "preemptions",
}


class EnginePass:
    """`wrap` may put another attention in the place of a step's own, `draw` another drawing and
    scoring.
    """

    name = "engine"
    rows_are_distinct = False

    def __init__(self, model: CausalLM, cfg: NativeEngineConfig) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.cfg = replace(cfg, dtype=str(next(model.parameters()).dtype).removeprefix("torch."))
        self.split = cfg.attention_split
        self.wrap: Callable[[Replaying, TokenAttention], TokenAttention] = (
            lambda replaying, attend: attend
        )
        self.sampler: Sampler = sample_and_score
        self.facts: dict[str, int] = {}
        self.troubles: list[str] = []

    @torch.inference_mode()
    def run(self, case: Case, tap: Tap) -> None:
        replaying = Replaying(self, case, tap)
        engine = replaying.engine
        for request in requests(case):
            engine.submit(request)
        with replaying.watched():
            while engine.has_work:
                engine.step()
        tap.share(*map(torch.from_numpy, replaying.origins.shared()))
        stats = engine.stats()
        self.facts = {what: stats[name] for name, what in _COUNTS.items()}
        self.facts[OWN_DRAWS] = int(replaying.alike.sum())
        self.troubles = replaying.origins.troubles


class Replaying:
    """One run: an engine, and on the device the rows of the case that its present step computes,
    and scores.
    """

    def __init__(self, path: EnginePass, case: Case, tap: Tap) -> None:
        self.path, self.case, self.tap = path, case, tap
        self.engine = ReplayEngine(
            path.model,
            sized(path, case),
            path.device,
            sampler=self._draw,
            before_step=self._before_step,
        )
        self.engine.new_version(VERSION)
        self.origins = KvProvenance(case, self.engine.num_pages, self.engine.page_size)
        self.step: ReplayStep | None = None
        self.alike = torch.zeros(case.num_rows + 1, dtype=torch.bool, device=path.device)
        self._numbers = {
            request_name(case, number): number for number in range(len(case.sequences))
        }
        self._nobody = case.num_rows
        most = self.engine.max_forward_tokens
        self._rows, self._scored = torch.full((2, most), self._nobody, device=path.device)
        self._tokens = torch.from_numpy(np.append(case.tokens, [0, 0])).to(path.device)

    @contextmanager
    def watched(self) -> Iterator[None]:
        model = self.path.model
        with ExitStack() as stack:
            stack.callback(model.register_forward_pre_hook(self._begin).remove)
            stack.enter_context(watch(model, self.tap.see))
            yield

    def _before_step(self, step: ReplayStep) -> None:
        """Tell the device whose tokens the next step computes."""
        self.step = step
        names = zip(step.uids.tolist(), step.indices.tolist(), strict=True)
        numbers = np.array([self._numbers[name] for name in names])
        computed = self.origins.step(step, numbers)
        last = (np.cumsum(step.lengths) - 1)[step.samples]
        for there, here in ((self._rows, computed), (self._scored, computed[last])):
            padded = np.full(len(there), self._nobody)
            padded[: len(here)] = here
            there.copy_(upload(padded, there.device))

    def _begin(self, model: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before a forward pass, also one that is being recorded."""
        tokens, positions, attend = args
        self.tap.begin(self._rows[: len(tokens)], None, self._scored)
        return tokens, positions, self.path.wrap(self, attend)

    def _draw(
        self, logits: Tensor, inv_temperature: Tensor, *rest: Any, **filters: Any
    ) -> tuple[Tensor, Tensor]:
        """The sample's tokens, scored by the op that draws; where it draws them, with the log-probs
        of the draw.
        """
        drawn, own = self.path.sampler(logits, inv_temperature, *rest, **filters)
        scored = self._scored[: len(logits)]
        tokens = self._tokens.index_select(0, scored + 1)
        alike = drawn == tokens
        self.alike.index_copy_(0, scored, alike & (scored != self._nobody))
        self.tap.skip()
        logprobs = self.path.sampler(logits, inv_temperature, *rest, given=tokens, **filters)[1]
        logprobs = torch.where(alike, own, logprobs)
        seen = self.tap.see(Point(self.path.model.spec.num_layers, "logprob"), logprobs)
        return tokens, seen.nan_to_num()  # an engine ends at NaN, and here it is to be traced


def request_name(case: Case, number: int) -> tuple[int, int]:
    """(uid, index) of a sequence's request, which its draws depend on."""
    return case.sequences[number].drawn_as or (number, 0)


def requests(case: Case) -> Iterator[Request]:
    """As a rollout submits them, each to end with its sample's last token."""
    for number, one in enumerate(case.sequences):
        sampling = replace(
            one.sampling, max_tokens=len(one.response), ignore_eos=True, stop=(), stop_ids=()
        )
        name, prompt = request_name(case, number), one.prompt.astype(np.int32)
        yield Request(*name, prompt, sampling, seed=one.seed)


def sized(path: EnginePass, case: Case) -> NativeEngineConfig:
    """The config, with just enough pages where it leaves their number open."""
    if path.cfg.num_pages:
        return path.cfg
    page_size = choose_sizes(path.cfg, path.model.spec, path.device).page_size
    one_more = len(case.sequences)  # an admission leaves a page for each running row
    return replace(path.cfg, num_pages=int((-(-case.lengths // page_size)).sum()) + one_more)
