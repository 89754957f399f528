"""The Rollout role: prompts in, graded groups of samples out.

The controller imports this module too, for the endpoints: torch comes in with the instance, on
workers only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from spmd_rl.config.rules import require
from spmd_rl.controller.capabilities import (
    Contracted,
    InTurns,
    MemoryPlanner,
    Pumped,
    Sleeper,
    WeightReceiver,
)
from spmd_rl.controller.deferred import Deferred
from spmd_rl.controller.endpoint import Role, Sharded, collective, concurrent, routed
from spmd_rl.controller.routing import Route
from spmd_rl.controller.shard_receipts import of_shard
from spmd_rl.controller.turns.shard_turns import ShardTurns
from spmd_rl.data.render.eos import eos_ids
from spmd_rl.errors import SpmdError
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.context import CallInfo
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.mesh.split import Placement
from spmd_rl.model.lora import NO_LORA, AdaptedBase, LoraConfig
from spmd_rl.model.read import read_spec
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.offload.phases import RoleSleep
from spmd_rl.offload.residency import Receipt
from spmd_rl.rollout.engine import Engine, SamplingConfig
from spmd_rl.rollout.engine_load import EngineLoad
from spmd_rl.rollout.episode_samples import ModelLimits
from spmd_rl.rollout.episodes import RunningEpisodes
from spmd_rl.rollout.grader_choice import GraderChoice, open_hooks
from spmd_rl.rollout.grading import Grading
from spmd_rl.rollout.group_call import GroupCall, GroupRequest
from spmd_rl.rollout.kinds import EngineConfig, EngineSite
from spmd_rl.rollout.memory import engine_memory
from spmd_rl.rollout.native.tp.share_news import share_news
from spmd_rl.rollout.request_flow import RequestFlow
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

if TYPE_CHECKING:
    from spmd_rl.weights.ends import WeightSink

T = TypeVar("T")
DEFAULT_HOOKS = HookConfig()

# of an engine that has none; a run with run.exact refuses the pair with any trainer
UNPROMISED_CONTRACT: dict[str, str | int] = {"engine": "no promise of the trainer's bits"}


def route_of(prompt: Prompt, sampling: SamplingConfig, *rest: object) -> Route:
    """Return what the choice of an engine for a prompt depends on."""
    cost = len(prompt.tokens) + sampling.num_samples * sampling.max_tokens
    return Route(prompt.uid, prompt.tokens, cost)


class Rollout(Role, WeightReceiver, Sleeper, Contracted, MemoryPlanner, Pumped, InTurns):
    """One engine a rank, each with the whole model; prompts are spread over the data axis.

    With `split.infer.tp`, ranks share an engine; with `split.infer.ep`, experts of native ones.

    `model` is a Hugging Face folder. `reward` names a reward function, or several with their
    weights; without one, groups have no rewards. `hooks` says how these run, and names the function
    that makes samples in several turns, if one does. `settings` is the recipe's config as plain
    data, which hooks may read. `seed` is that of the draws. `reserved_bytes` is GPU memory that the
    plan counts beside the engine's own, and `sleep` says in which phases the engine's memory is
    awake; the controller passes both. With `lora`, the trainer pushes adapters alone. With
    `records_routes`, requests may ask for the experts of their tokens.
    """

    MEMORY_TAGS: ClassVar[tuple[str, ...]] = ("weights", "kv")

    def __init__(
        self,
        cfg: EngineConfig,
        context: RoleContext,
        model: str,
        seed: int,
        reward: str | dict[str, float] = "",
        hooks: HookConfig = DEFAULT_HOOKS,
        settings: dict[str, Any] | None = None,
        reserved_bytes: int = 0,
        sleep: RoleSleep | None = None,
        lora: AdaptedBase | None = None,
        records_routes: bool = False,
    ) -> None:
        super().__init__(cfg, context)
        self.seed = seed
        spec, raises = read_spec(model), hooks.on_error == "raise"
        # its processes import the hooks while this one loads
        hooked = open_hooks(hooks, reward, settings, context, model)
        self.tokenizer = load_tokenizer(model)
        from spmd_rl.offload.role_memory import RoleMemory
        from spmd_rl.rollout.build import build_engine

        self.memory = RoleMemory(sleep, context.device)
        self.engine: Engine = build_engine(
            cfg,
            EngineSite(
                model,
                context,
                self._decode,
                seed,
                reserved_bytes,
                self.memory,
                lora,
                records_routes,
            ),
        )
        self._pushes_all = lora is None
        grading = self._episodes = None
        self._pool = pool = hooked.pool
        if pool is not None and hooked.rewards:
            choice = GraderChoice(hooked.rewards, hooked.weights)
            grading = Grading(pool, choice, raises=raises)
        limits = ModelLimits.of(spec)
        if pool is not None and hooks.generate:
            self._episodes = RunningEpisodes(pool, limits, raises=raises)
        self._flow = RequestFlow(
            self.engine, self._text_of, limits, pool, grading, self._episodes, context.trace
        )
        known = self.tokenizer.config_eos_ids
        self._more_ends = tuple(
            one for one in eos_ids(self.tokenizer) if one not in known and one < spec.vocab_size
        )

    @classmethod
    def planned_memory(
        cls,
        cfg: EngineConfig,
        placement: Placement,
        model: str,
        on_gpu: bool,
        lora: LoraConfig = NO_LORA,
        row_shards: int = 1,
    ) -> Sequence[TagBytes]:
        """Return what the role takes of one of its ranks, as `engine_memory` says."""
        tp, ep = (placement.axes.get(axis, 1) for axis in ("tp", "ep"))
        return engine_memory(read_spec(model), cfg, on_gpu, lora, tp, ep, row_shards)

    @concurrent
    @collective
    def generate(
        self,
        prompts: Sharded[list[Prompt]],
        sampling: SamplingConfig,
        seed: int | None = None,
        step: int = 0,
        evaluation: bool = False,
    ) -> Deferred[Sharded[list[Group]]]:
        """Return all samples of all prompts, graded where there is a reward function.

        Each rank gets a fixed share of the prompts; `complete` spreads them by load instead.
        `seed` stands in for the role's own, such as for an evaluation. Hooks are told `step` and
        `evaluation`. A sample on which a hook fails ends the call, or has failed if
        `hooks.on_error` says so. A group that this leaves with a single sample, which nothing
        compares with, is emptied, but for an evaluation.
        Answers: once the last sample of this rank's prompts is finished; aborted, with what there
        is.
        """
        _require_distinct(prompts)
        requests = [GroupRequest(prompt) for prompt in prompts]
        info = _call_info(self, seed, step, evaluation)
        return self._start(requests, sampling, info, lambda groups: groups)

    @concurrent
    @routed(route_of)
    def complete(
        self,
        prompt: Prompt,
        sampling: SamplingConfig,
        index: int = 0,
        partial: list[Sample] | None = None,
        seed: int | None = None,
        step: int = 0,
        evaluation: bool = False,
        round_tokens: int = 0,
    ) -> Deferred[Group]:
        """Return the samples of one prompt, `index` and those after it, from the engine with the
        least to do.

        `partial` are samples of an earlier answer that was aborted: what is unfinished goes on.
        With `round_tokens` each sample draws at most that many tokens now. One that is not finished
        then has the status "aborted", and its group is not graded as a whole.
        Answers: once the last sample is finished; aborted, with what there is.
        """
        request = GroupRequest(prompt, index, partial or [], round_tokens)
        info = _call_info(self, seed, step, evaluation)
        return self._start([request], sampling, info, lambda groups: groups[0])

    @concurrent
    @collective
    def partials(self) -> Deferred[Sharded[list[Group]]]:
        """Return all groups that are unanswered, as they are now; their requests go on.

        It answers at once. It is deferred because of a shard only the first rank hears of rewards.
        """
        return Deferred.of(self._flow.snapshots())

    def close(self) -> None:
        """End the processes of the hooks; they would end with this one."""
        if self._pool is not None:
            self._pool.close()

    def has_work(self) -> bool:
        """Whether the engine can take a step now."""
        return self._flow.can_step

    def pump(self) -> None:
        """Take the engine one step further, hear the hooks, and answer the calls that end."""
        self.pump_in_step(self._flow.can_step)

    def pump_in_step(self, steps: bool) -> None:
        """Pump; the engine takes a step if `steps` is set, also one without a request."""
        try:
            self._flow.step(steps)
        except BaseException:
            self._flow.clear()
            raise

    def pump_in_shard(self, turns: ShardTurns[Any]) -> None:
        """Pump in the steps that the first rank of the shard takes."""
        self.pump_in_step(share_news(self.engine, turns, self._flow.can_step))

    def live_counts(self) -> dict[str, int]:
        """Return where the episodes of this rank are, if there are some. Any thread may call it."""
        return {} if self._episodes is None else self._episodes.live_counts()

    def watched(self) -> Sequence[int]:
        """Return file descriptors that are readable when there is work again."""
        return self._flow.watched()

    @concurrent
    @collective
    def stats(self) -> Sharded[list[dict[str, int]]]:
        """The engine's counts, one entry a rank."""
        return [self.engine.stats()]

    @concurrent
    @collective
    def take_load(self) -> Deferred[Sharded[list[EngineLoad]]]:
        """Return the load of each engine since the last call, as a shard's first rank saw it.

        It answers at once. It is deferred because the ranks of a shard count steps each by itself.
        """
        return Deferred.of([self._flow.meter.take(self.engine.stats())])

    @collective
    def sleep(self, tags: tuple[str, ...] = ()) -> Sharded[list[Receipt]]:
        """Give the memory of weights and of KV pages back."""
        return of_shard(self.context, self.engine.sleep(tags))

    @collective
    def wake(self, tags: tuple[str, ...] = ()) -> Sharded[list[Receipt]]:
        """Take the memory again. Weights that a link pushes are unset until its next push."""
        return of_shard(self.context, self.engine.wake(tags))

    def numeric_contract(self) -> dict[str, str | int]:
        """What the engine's bits depend on, besides the weights."""
        contract = self.engine.contract()
        return UNPROMISED_CONTRACT if contract is None else contract

    def weight_sink(self) -> WeightSink:
        """Return where pushed weights go: this rank's engine. It keeps none while it sleeps.

        A base beside adapters is not pushed, so it survives a sleep.
        """
        if self._pushes_all:
            self.memory.drop("weights")
        return self.engine.sink()

    def _start(
        self,
        requests: Sequence[GroupRequest],
        sampling: SamplingConfig,
        info: CallInfo,
        value_of: Callable[[list[Group]], T],
    ) -> Deferred[T]:
        """Begin groups; the answer is `value_of` all of them, in this order."""
        if self._more_ends and not sampling.ignore_eos:
            sampling = replace(sampling, stop_ids=sampling.stop_ids + self._more_ends)
        call = GroupCall(self._flow, len(requests), value_of)
        try:
            for number, request in enumerate(requests):
                call.opened[number] = self._flow.add(
                    request.prompt,
                    sampling,
                    functools.partial(call.on_done, number),
                    info=info,
                    first_index=request.first_index,
                    partial=request.partial,
                    round_tokens=request.round_tokens,
                )
        except BaseException:
            call.abort_all()
            raise
        call.answer_if_whole()
        return call.answer

    def _decode(self, tokens: tuple[int, ...]) -> str:
        return self.tokenizer.decode(list(tokens))

    def _text_of(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def _call_info(role: Rollout, seed: int | None, step: int, evaluation: bool) -> CallInfo:
    """Return what hooks are told of a call. Raises: ConfigError for a seed out of range."""
    seed = role.seed if seed is None else seed
    require(0 <= seed < 1 << 63, "seed", seed, "in [0, 2^63)")
    return CallInfo(step, role.engine.version or 0, evaluation, seed)


def _require_distinct(prompts: Sequence[Prompt]) -> None:
    """Raise an SpmdError if two prompts have the same uid."""
    if len({prompt.uid for prompt in prompts}) < len(prompts):
        raise SpmdError(
            "two prompts of one call have the same uid, so their samples would be drawn alike"
        )
