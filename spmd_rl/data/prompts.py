"""Prompts for rollouts, drawn in a repeatable order from one data file or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from spmd_rl.data.mixture import Pick
from spmd_rl.data.prompt_records import PromptConfig as PromptConfig
from spmd_rl.data.prompt_records import PromptPreparer
from spmd_rl.data.render.eos import StopConditions, sampling_warnings
from spmd_rl.data.render.tokenizer import Tokenizer
from spmd_rl.data.source import DataSource
from spmd_rl.data.stream import RecordStream
from spmd_rl.errors import SpmdError
from spmd_rl.types.prompts import Prompt


class Prompts(RecordStream[Prompt], DataSource):
    """An endless stream of prompts from data files, as `RecordStream` describes it.

    A prompt's uid is the number of its draw. With `sampling`, the constructor prints what would
    cut samples: no end-of-text token, or a short context.
    Raises: as `RecordStream`.
    """

    def __init__(
        self,
        data: str | Mapping[str, float],
        cfg: PromptConfig,
        tokenizer: Tokenizer,
        sampling: StopConditions | None = None,
        *,
        pick: Pick | None = None,
        per_step: int = 1,
    ) -> None:
        super().__init__(
            data,
            PromptPreparer(cfg, tokenizer),
            seed=cfg.seed,
            shuffle=cfg.shuffle,
            pick=pick,
            per_step=per_step,
        )
        if sampling is not None:
            self._warn(tokenizer, sampling)
        self._given_back: list[int] = []  # uids, in order

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts, across the end of an epoch if need be.

        Those that were given back come first, in the order of their uids.
        """
        again, self._given_back = self._given_back[:num_prompts], self._given_back[num_prompts:]
        drawn = self.drawn_at(again)
        drawn += self.numbered_draw(num_prompts - len(drawn))
        return [prompt.replace(uid=uid, meta=prompt.meta.copy()) for uid, prompt in drawn]

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Have these prompts taken again, under the uids that they have.

        Raises: SpmdError for a prompt that is not out.
        """
        uids = sorted(self._given_back + [prompt.uid for prompt in prompts])
        for uid, following in pairwise([*uids, self.num_drawn]):
            if not 0 <= uid < following:
                raise SpmdError(f"prompt {uid} is given back, but it is not out")
        self._given_back = uids

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain data.

        That is the draws so far, the uids that were given back, and a digest of the data.
        """
        return super().state() | {"given_back": self._given_back}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the draw at which `state` was taken.

        Raises: DataError when the data is not the same.
        """
        super().restore(state)
        self._given_back = list(state.get("given_back", ()))

    def _warn(self, tokenizer: Tokenizer, sampling: StopConditions) -> None:
        """Print what would cut samples; what is so for all files, once."""
        lines = [
            line
            for path, prompts in self.first().items()
            for line in sampling_warnings(
                tokenizer,
                sampling,
                [len(prompt.tokens) for prompt in prompts],
                path,
            )
        ]
        print(*dict.fromkeys(lines), sep="\n", end="\n" * bool(lines), flush=True)
