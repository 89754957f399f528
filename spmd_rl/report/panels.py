"""Charts of known metrics: which lines share a chart, in which order and colours.

The lines of one chart have one unit, because they share one axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from spmd_rl.report.pictures.colours import AMBER, BLUE, GREEN, LINES, PHASES, RED, Colour

LEVEL = 0.01  # change of a value, as a share of it, that a chart from 0 does not show
ROUNDING = 1e-6  # a sum that is 0 in exact arithmetic, such as the loss on policy, stays below


class Line(NamedTuple):
    """A metric of a chart, its label in the legend, and its colour if not that of its place."""

    metric: str
    label: str
    colour: Colour | None = None


@dataclass(frozen=True)
class Panel:
    """A chart. Its `lines` have the colours of their places.

    The axis begins at `floor` or below. With `share` it ends at 1; with `whole` it holds the
    outliers too. Lines whose values all stay below `noise` are 0 but for rounding.
    """

    title: str
    lines: tuple[Line, ...]
    unit: str = ""
    floor: float | None = 0
    share: bool = False
    whole: bool = False
    stacked: bool = False
    noise: float = 0.0

    def colour(self, place: int) -> Colour:
        return self.lines[place].colour or LINES[place]


def _panel(title: str, *lines: Line, **layout: object) -> Panel:
    return Panel(title, lines, **layout)  # type: ignore[arg-type]


PANELS = (
    _panel("Reward", Line("reward/mean", "mean"), floor=None, share=True),
    _panel(
        "Prompts solved always, or never",
        Line("reward/solve_all", "all ≥ 1", GREEN),
        Line("reward/solve_none", "none > 0", AMBER),
        share=True,
    ),
    _panel("Spread of rewards", Line("reward/std", "standard deviation")),
    _panel("Response length", Line("rollout/response_tokens_mean", "mean"), unit="tokens"),
    _panel("Truncated responses", Line("rollout/truncated", "share", AMBER), share=True),
    _panel(
        "Groups of the sampler",
        Line("rollout/running", "in generation"),
        Line("rollout/buffered", "buffered"),
        Line("rollout/carried", "carried over"),
        Line("rollout/rejected", "rejected"),
        Line("rollout/surplus", "surplus"),
        Line("rollout/missing", "missing"),
        unit="groups",
    ),
    _panel("Samples that wait for an engine", Line("rollout/waiting", "waiting"), unit="samples"),
    _panel(
        "Requests in an engine",
        Line("engine/running_mean", "running, mean"),
        Line("engine/running_max", "running, most"),
        Line("engine/waiting_mean", "waiting, mean"),
        Line("engine/waiting_max", "waiting, most"),
        unit="samples",
    ),
    _panel("Prefix cache of the engines", Line("engine/prefix_hits", "of tokens"), share=True),
    _panel("Evicted samples", Line("engine/preemptions", "evicted"), unit="samples"),
    _panel(
        "Tokens computed again",
        Line("engine/recomputed_tokens", "of samples that had begun"),
        unit="tokens",
    ),
    _panel("Clipped keys and values", Line("engine/kv_clipped", "of elements"), share=True),
    _panel("Entropy", Line("train/entropy", "per token", AMBER), unit="nats"),
    _panel("Clip fraction", Line("train/clip_frac", "of tokens")),
    _panel(
        "KL divergences of the policy",
        Line("train/kl", "from the reference"),
        Line("train/ppo_kl", "from the behaviour"),
        unit="nats",
        floor=None,
        noise=ROUNDING,
    ),
    _panel("Correction weight", Line("train/correction_weight", "trainer / engine")),
    _panel(
        "Tokens left out of the loss",
        Line("train/rejected_frac", "rejected"),
        Line("train/opsm_frac", "masked off-policy"),
    ),
    _panel("Prompts learned from", Line("train/kept_groups", "share"), share=True),
    _panel("Critic's loss", Line("critic/loss", "loss")),
    _panel("Critic's values", Line("critic/value", "mean"), floor=None),
    _panel("Critic's explained variance", Line("critic/explained_variance", "share"), floor=None),
    _panel("Critic's clipped values", Line("critic/clip_frac", "share")),
    _panel("Critic's gradient norm", Line("critic/grad_norm", "before clipping")),
    _panel("Critic's learning rate", Line("critic/lr", "rate")),
    _panel("Failed samples", Line("reward/failed_samples", "left out"), unit="samples"),
    _panel("Failed prompts", Line("reward/failed_groups", "left out", AMBER), unit="prompts"),
    _panel(
        "Mismatched tokens",
        Line("onpolicy/mismatched_tokens", "of a step", RED),
        Line("onpolicy/router_flips", "to other experts"),
        unit="tokens",
        whole=True,
    ),
    _panel(
        "Largest load of an expert",
        Line("experts/max_load", "mean of layers"),
        Line("experts/max_load_worst", "worst layer", AMBER),
    ),
    _panel(
        "Evenness of experts",
        Line("experts/entropy", "mean of layers"),
        Line("experts/entropy_worst", "worst layer", AMBER),
        share=True,
    ),
    _panel(
        "Unused experts",
        Line("experts/unused", "mean of layers"),
        Line("experts/unused_worst", "worst layer", AMBER),
        share=True,
    ),
    _panel(
        "Routes that replay changed",
        Line("experts/rerouted", "mean of layers"),
        Line("experts/rerouted_worst", "worst layer", AMBER),
        share=True,
    ),
    _panel("Balance loss of experts", Line("experts/balance_loss", "loss")),
    _panel(
        "Share of tokens compared",
        Line("onpolicy/compared_share", "of the engine's tokens"),
        unit="share",
        share=True,
    ),
    _panel(
        "Trainer vs engine",
        Line("onpolicy/max_abs_dlogp", "max |Δ log-prob|"),
        Line("onpolicy/mean_abs_dlogp", "mean |Δ log-prob|"),
        Line("onpolicy/k1", "KL, k1"),
        Line("onpolicy/k3", "KL, k3"),
        unit="nats",
        whole=True,
    ),
    _panel("Effective sample size, trainer / engine", Line("onpolicy/ess", "share"), share=True),
    _panel("Chi-square divergence, trainer / engine", Line("onpolicy/chi2", "chi-square", AMBER)),
    _panel(
        "Pairs ranked as labelled",
        Line("dpo/accuracy", "DPO"),
        Line("reward_model/accuracy", "reward model"),
        share=True,
    ),
    _panel(
        "Rewards of pairs",
        Line("dpo/margin", "margin"),
        Line("dpo/chosen_reward", "chosen"),
        Line("dpo/rejected_reward", "rejected"),
        floor=None,
    ),
    _panel(
        "Reward model's rewards of pairs",
        Line("reward_model/margin", "margin"),
        Line("reward_model/chosen", "chosen"),
        Line("reward_model/rejected", "rejected"),
        floor=None,
    ),
    _panel(
        "Log-probs of answers",
        Line("dpo/chosen_logprob", "chosen", AMBER),
        Line("dpo/rejected_logprob", "rejected", GREEN),
        unit="nats",
        floor=None,
    ),
    _panel(
        "Student and teacher",
        Line("distill/kl", "KL, from samples"),
        Line("distill/topk_kl", "KL, of candidates"),
        Line("distill/teacher_logprob", "teacher's log-prob"),
        unit="nats",
        floor=None,
    ),
    _panel(
        "Accepted samples",
        Line("rejection/kept_samples", "written"),
        Line("rejection/duplicates", "repeated"),
        unit="samples",
    ),
    _panel("Prompts solved", Line("rejection/solved", "share"), share=True),
    _panel("Learned tokens", Line("data/learned_tokens", "of a step"), unit="tokens"),
    _panel("Records left out", Line("data/dropped", "so far"), unit="records"),
    _panel("Epochs", Line("data/epoch", "passes over the data")),
    _panel("Warm-up loss", Line("warmup/loss", "loss"), floor=None),
    _panel("Loss", Line("train/loss", "loss"), floor=None, noise=ROUNDING),
    _panel("Gradient norm", Line("train/grad_norm", "before clipping")),
    _panel("Learning rate", Line("train/lr", "rate")),
    _panel(
        "Sample age",
        Line("version/lag_mean", "mean"),
        Line("version/lag_max", "oldest token"),
        unit="versions",
    ),
    _panel(
        "Tokens of older weights",
        Line("version/older_share", "of the engine's tokens"),
        Line("version/masked_share", "left out of the loss"),
        share=True,
    ),
    _panel(
        "Time per step",
        *(Line(f"time/{phase}", phase, colour) for phase, colour in PHASES.items()),
        unit="s",
        stacked=True,
    ),
    _panel(
        "Speed",
        Line("rollout/tokens_per_s", "rollout"),
        Line("perf/train_tokens_per_s", "train"),
        unit="tokens/s",
    ),
    _panel(
        "Tokens per step",
        Line("train/tokens", "trained"),
        Line("onpolicy/drawn_tokens", "of the engine"),
        Line("onpolicy/compared_tokens", "compared"),
        unit="tokens",
    ),
    _panel("Time per warm-up step", Line("time/warmup", "whole step"), unit="s"),
    _panel(
        "Time of a request",
        Line("time/agent_mean", "agent"),
        Line("time/queue_mean", "queue"),
        Line("time/prefill_mean", "prefill"),
        Line("time/decode_mean", "decode"),
        Line("time/grading_mean", "grading"),
        Line("time/request_max", "longest, in all"),
        unit="s",
    ),
    _panel("Reward function time", Line("time/reward", "all processes"), unit="s"),
    _panel("Time to verify weights", Line("time/verify", "slowest rank"), unit="s"),
    _panel(
        "Weights of the engine",
        Line("sync/tensors", "pushed"),
        Line("sync/verified_tensors", "equal to the trainer's"),
        Line("sync/shared_tensors", "the trainer's memory"),
        unit="tensors",
    ),
    _panel("Grading time", Line("time/grade", "with a model"), unit="s"),
    _panel("Checkpoint time", Line("time/save", "copy, while steps wait"), unit="s"),
    _panel("Model FLOPs utilisation", Line("perf/mfu", "MFU")),
    _panel("Controller's share of the step", Line("perf/controller_share", "share", AMBER)),
    _panel("Device memory", Line("memory/gpu_peak_gib", "peak"), unit="GiB"),
    _panel(
        "Memory of roles that sleep, of a step",
        Line("memory/slept_gib", "given back"),
        Line("memory/copied_gib", "copied to the host and back"),
        unit="GiB",
    ),
    _panel("Wait for restored memory", Line("memory/restore_s", "of a train step"), unit="s"),
)

PANEL_OF_METRIC = {line.metric: panel for panel in PANELS for line in panel.lines}
_COLOURS = {
    line.metric: panel.colour(place) for panel in PANELS for place, line in enumerate(panel.lines)
}


def colour_of(metric: str) -> Colour:
    """Return the colour of a known metric's line, and blue of others, which are alone."""
    return _COLOURS.get(metric, BLUE)
