"""Signs of trouble in a run, which ask for a look although no score may show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from spmd_rl.report.means import fifths, latest_mean, mean_of
from spmd_rl.report.pictures.time_axes import is_number
from spmd_rl.report.samples import failed_errors
from spmd_rl.report.verdicts.findings import NOT_MOVING, SOLVED, Finding, Setup
from spmd_rl.types.failures import told_causes

Row = dict[str, Any]

MANY_TRUNCATED = 0.1  # share of responses from which it is a warning
MANY_SOLVED = 0.5  # share of prompts with rewards of 1 only, or without a reward
LONGER = 2.0  # factor in length that is a warning
FAR = 1.0  # nats per token from the reference that are a warning
MAX_READ = 20  # files of samples
_REJECTED = "rollout/rejected_"


def signs(steps: Sequence[Row], setup: Setup) -> Iterator[Finding]:
    """Yield what asks for a look in the training steps, with what to do about it."""
    yield from _failed(steps, setup)
    yield from _mismatched(steps, setup)
    yield from _without_difference(steps, setup)
    yield from _without_gradient(steps, setup)
    yield from _lengths(steps, setup)
    yield from _divergence(steps, setup)
    yield from _rejected(steps)


def _failed(steps: Sequence[Row], setup: Setup) -> Iterator[Finding]:
    if failed := _total(steps, "reward/failed_samples"):
        yield Finding(
            "bad",
            f"{failed:,.0f} samples failed, and nothing was learned from them",
            (*_causes(steps, setup), f"Read more in {setup.folder}/samples: docs/failures.md"),
        )


def _causes(steps: Sequence[Row], setup: Setup) -> Iterator[str]:
    """Yield why samples failed, as the files of the last steps with failures say."""
    failed = [row["step"] for row in steps if row.get("reward/failed_samples")]
    read = failed[-MAX_READ:]
    errors = (error for step in read for error in failed_errors(setup.folder, step))
    for line in told_causes(errors):
        yield f"Failed in the last {len(read)} steps with failures: {line}"


def _mismatched(steps: Sequence[Row], setup: Setup) -> Iterator[Finding]:
    name = "onpolicy/mismatched_tokens"
    if mismatched := _total(steps, name):
        compared = _total(steps, "onpolicy/compared_tokens")
        yield Finding(
            "bad" if setup.settings.get("run.exact") is True else "",
            f"{mismatched:,.0f} of {compared:,.0f} tokens differ between trainer and engine",
            (f"See which op makes the difference: spmd-rl mismatch {setup.folder.name}",),
        )


def _without_difference(steps: Sequence[Row], setup: Setup) -> Iterator[Finding]:
    """Yield shares of prompts that teach nothing, where rewards are from 0 to 1."""
    rewards = [row["reward/mean"] for row in steps if is_number(row.get("reward/mean"))]
    if not rewards or max(rewards) > 1 or min(rewards) < 0:
        return
    none, solved = (_latest(steps, f"reward/solve_{name}") for name in ("none", "all"))
    if none >= MANY_SOLVED:
        more = setup.named("sampling.num_samples")
        yield Finding(
            "bad",
            f"{none:.0%} of the last prompts had no reward above 0, and taught nothing",
            (
                "Read the samples below. If the answers are wrong, take easier prompts, or raise "
                f"{more or 'the number of samples'}. If they are right, mend the reward: "
                f"{NOT_MOVING}",
            ),
        )
    if solved >= MANY_SOLVED:
        yield Finding(
            "flat",
            f"{solved:.0%} of the last prompts had rewards of 1 only, and taught nothing",
            (f"Take harder prompts, because what is solved gives no gradient: {SOLVED}",),
        )


def _without_gradient(steps: Sequence[Row], setup: Setup) -> Iterator[Finding]:
    """Yield how many steps learned nothing, and how many of these had only tokens too old."""
    empty = [row for row in steps if row.get("train/grad_norm") == 0]
    if not empty:
        return
    text = f"{len(empty):,} of {len(steps):,} steps learned nothing: their gradient norm is 0"
    masked = sum(row.get("version/masked_share") == 1 for row in empty)
    if not masked:
        yield Finding("flat", text)
        return
    yield Finding(
        "bad",
        f"{text}, and in {masked:,} of them mask_lag left out all tokens",
        (f"Raise {setup.named('mask_lag') or 'mask_lag'}, so that carried groups teach too",),
    )


def _lengths(steps: Sequence[Row], setup: Setup) -> Iterator[Finding]:
    if (last := _latest(steps, "rollout/truncated")) >= MANY_TRUNCATED:
        first = _first(steps, "rollout/truncated")
        yield Finding(
            "bad",
            f"{last:.0%} of the last responses were cut at sampling.max_tokens, "
            f"{first:.0%} of the first",
            (
                f"Raise {setup.named('sampling.max_tokens') or 'sampling.max_tokens'}, or see in "
                "the samples below why answers do not end",
            ),
        )
    name = "rollout/response_tokens_mean"
    first, last = _first(steps, name), _latest(steps, name)
    if len(fifths(steps, name)) > 1 and (last >= LONGER * first or first >= LONGER * last > 0):
        yield Finding(
            "bad",
            f"Responses went from {first:.4g} to {last:.4g} tokens",
            ("Order the samples below by length, and see what the longer or shorter ones gain",),
        )


def _divergence(steps: Sequence[Row], setup: Setup) -> Iterator[Finding]:
    if (last := _latest(steps, "train/kl")) >= FAR:
        hold = setup.named("kl.coef")
        yield Finding(
            "bad",
            f"The policy is {last:.3g} nats per token away from its reference",
            ((f"Raise {hold}, which holds the policy near its reference",) if hold else ())
            + setup.slower,
        )


def _rejected(steps: Sequence[Row]) -> Iterator[Finding]:
    names = sorted({name for row in steps for name in row if name.startswith(_REJECTED)})
    counts = {name.removeprefix(_REJECTED): _total(steps, name) for name in names}
    if named := [f"{count:,.0f} {reason}" for reason, count in counts.items() if count]:
        yield Finding("", f"Rejected groups by reason: {', '.join(named)}")


def _first(steps: Sequence[Row], name: str) -> float:
    parts = fifths(steps, name)
    return mean_of(parts[0], name).value if parts else 0.0


def _latest(steps: Sequence[Row], name: str) -> float:
    """Return the mean over the last fifth of the steps, 0 where none has the metric."""
    mean = latest_mean(steps, name)
    return mean.value if mean else 0.0


def _total(steps: Sequence[Row], name: str) -> float:
    return sum(row[name] for row in steps if is_number(row.get(name)))
