"""Prompts for rollouts, drawn in a repeatable order from one data file or several."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from spmd_rl.data.eos import StopConditions, sampling_warnings
from spmd_rl.data.epoch_order import EpochOrder
from spmd_rl.data.mixture import Mixture, Pick, data_weights, source_names
from spmd_rl.data.prompt_format import Tokenizer
from spmd_rl.data.prompt_records import PromptConfig as PromptConfig
from spmd_rl.data.prompt_store import open_prompts
from spmd_rl.data.source import DataSource
from spmd_rl.data.stream import DATA_CHANGED
from spmd_rl.errors import DataError, SpmdError
from spmd_rl.types.prompts import Prompt


class Prompts(DataSource):
    """An endless stream of prompts from a data file, or a slice `path@[start:stop]` of one.

    `data` may also be a mixture: paths with weights. The source of each draw follows from the
    seed and the number of the draw, and every source has an order of its own. `pick(step, names)`
    returns other weights for each step of `per_step` draws.

    `len()` is the number of prompts of an epoch; `num_dropped` counts those that were too long.
    Those of a large file are dropped when they are drawn, and until then `len()` counts them.
    With `sampling`, the constructor prints what would cut samples: no end-of-text token, or a
    short context.
    Raises: DataError (file, line, field) or ConfigError in the constructor. Later only for a large
    file, whose records are read when they are drawn, and for weights of `pick`.
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
        weights = data_weights(data)
        names = source_names([*weights])
        self._paths = ", ".join(weights)
        self._stores = [
            open_prompts(path, cfg, tokenizer, name)
            for path, name in zip(weights, names, strict=True)
        ]
        if sampling is not None:
            self._warn(tokenizer, sampling, [*weights])
        by_name = dict(zip(names, weights.values(), strict=True))
        self._mixture = Mixture(by_name, seed=cfg.seed, pick=pick, per_step=per_step)
        seeds: list[int | str] = [cfg.seed]
        if len(names) > 1:
            seeds = [f"{cfg.seed}/{name}" for name in names]
        self._orders = [
            EpochOrder(len(store), seed=seed, shuffle=cfg.shuffle)
            for store, seed in zip(self._stores, seeds, strict=True)
        ]
        self._num_drawn = 0
        self._given_back: list[int] = []  # uids, in order

    def __len__(self) -> int:
        return sum(map(len, self._stores))

    @property
    def num_dropped(self) -> int:
        """How many prompts were found to be too long so far."""
        return sum(store.num_dropped for store in self._stores)

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts, across the end of an epoch if need be.

        Those that were given back come first, in the order of their uids.
        """
        again, self._given_back = self._given_back[:num_prompts], self._given_back[num_prompts:]
        prompts = self._drawn(again)
        while num_left := num_prompts - len(prompts):
            first = self._num_drawn
            self._num_drawn += num_left
            prompts += self._drawn(range(first, self._num_drawn))
        return prompts

    def skip(self, num_prompts: int) -> None:
        """Go on as if `num_prompts` draws had been taken before."""
        self._num_drawn += num_prompts

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Have these prompts taken again, under the uids that they have.

        Raises: SpmdError for a prompt that is not out.
        """
        uids = sorted(self._given_back + [prompt.uid for prompt in prompts])
        for uid, following in pairwise([*uids, self._num_drawn]):
            if not 0 <= uid < following:
                raise SpmdError(f"prompt {uid} is given back, but it is not out")
        self._given_back = uids

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain data.

        That is the draws so far, the uids that were given back, and a digest of the data.
        """
        return {
            "drawn": self._num_drawn,
            "given_back": self._given_back,
            "digest": self._digest,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the draw at which `state` was taken.

        Raises: DataError when the data is not the same.
        """
        if state["digest"] != self._digest:
            raise DataError(self._paths, f"the prompts are {DATA_CHANGED}")
        self._num_drawn, self._given_back = state["drawn"], list(state.get("given_back", ()))

    def _drawn(self, uids: Sequence[int]) -> list[Prompt]:
        """Return the prompts of these draws, without those that are too long."""
        of_source: dict[int, dict[int, int]] = {}  # uid and number of the record, by source
        for uid, (source, draw) in zip(uids, self._mixture.places(uids), strict=True):
            of_source.setdefault(source, {})[uid] = self._orders[source].index_of(draw)
        found: dict[int, Prompt | None] = {}
        for source, numbers in of_source.items():
            prompts = self._stores[source].get([*numbers.values()])
            found |= dict(zip(numbers, prompts, strict=True))
        return [
            prompt.replace(uid=uid, meta=prompt.meta.copy())
            for uid in uids
            if (prompt := found[uid]) is not None
        ]

    def _warn(self, tokenizer: Tokenizer, sampling: StopConditions, paths: Sequence[str]) -> None:
        """Print what would cut samples; what is so for all files, once."""
        lines = [
            line
            for path, store in zip(paths, self._stores, strict=True)
            for line in sampling_warnings(
                tokenizer, sampling, tokenizer.context, store.lengths, path
            )
        ]
        print(*dict.fromkeys(lines), sep="\n", end="\n" * bool(lines), flush=True)

    @cached_property
    def _digest(self) -> str:
        digests = [store.digest for store in self._stores]
        if len(digests) == 1:
            return digests[0]
        named = [" ".join(pair) for pair in zip(self._mixture.names, digests, strict=True)]
        return hashlib.sha256("\n".join(named).encode()).hexdigest()
