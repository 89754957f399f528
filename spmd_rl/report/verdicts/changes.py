"""What changed in a run: its scores, first against now, and against their best."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from spmd_rl.observe.metrics import METRIC_OF_NAME
from spmd_rl.report.means import MIN_STANDARD_ERRORS, Mean, evaluation_mean, fifths, mean_of
from spmd_rl.report.pictures.time_axes import is_number, training_rows
from spmd_rl.report.verdicts.findings import NOT_MOVING, Finding, Mood, Setup
from spmd_rl.report.verdicts.main_scores import MAIN_SCORES
from spmd_rl.report.verdicts.signs import signs

Row = dict[str, Any]

LARGE_LOSS = 0.25  # share of what was gained, from which a fall from the best counts
SCORE_OF_SET = re.compile(rf"eval/(.+)/({'|'.join(MAIN_SCORES)})")
IN_TRAINING = {  # -1 where less is better
    "reward/mean": ("Reward in training", 1),
    "dpo/accuracy": ("Pairs ranked as labelled in training", 1),
    "reward_model/accuracy": ("Pairs ranked as labelled in training", 1),
    "distill/kl": ("KL to the teacher in training", -1),
    "distill/topk_kl": ("KL to the teacher in training", -1),
    "train/loss": ("Loss in training", -1),
}


class Score(NamedTuple):
    """A score over the run: what it is called, and its means with the places they are of.

    `places` says for each mean where in the run it is. With `better` -1 less is better.
    """

    what: str
    means: Sequence[Mean]
    places: Sequence[str]
    better: int

    @property
    def best(self) -> int:
        """The number of the best mean, the latest of equals."""
        return max(range(len(self.means)), key=lambda i: (self.better * self.means[i].value, i))

    @property
    def is_past_best(self) -> bool:
        """Whether it gained, and has lost some of that since."""
        first, last = self.means[0].value, self.means[-1].value
        best = self.means[self.best].value
        return best != last and best != first

    @property
    def still_improves(self) -> bool:
        """Whether the last mean is the best, and beyond the noise better than the one before."""
        return self.best == len(self.means) - 1 and self.means[-1].differs(self.means[-2])

    @property
    def has_lost(self) -> bool:
        """Whether the loss since the best counts: beyond the noise, or much of what was gained."""
        first, last, best = self.means[0], self.means[-1], self.means[self.best]
        lost, gained = abs(best.value - last.value), abs(best.value - first.value)
        return self.is_past_best and (last.differs(best) or lost > LARGE_LOSS * gained)


def what_changed(rows: Sequence[Row], setup: Setup) -> list[dict[str, Any]]:
    """Return the findings on a run as plain data, in the order of their weight."""
    steps = training_rows(rows)
    scores = [*_evaluations(rows, setup), *_in_training(steps, setup)]
    looks = list(signs(steps, setup))
    found = [*scores, *looks, *_parts(steps), *_of_all(rows, scores, looks, setup)]
    return [one._asdict() for one in found]


def _evaluations(rows: Sequence[Row], setup: Setup) -> Iterator[Finding]:
    names = {name: match for row in rows for name in row if (match := SCORE_OF_SET.fullmatch(name))}
    for name, match in names.items():
        found = [row for row in rows if is_number(row.get(name))]
        if len(found) < 2:
            continue
        steps = [int(row["step"]) for row in found]
        span = f"from step {steps[0]} to {steps[-1]}"
        score = Score(
            f"Evaluation {match[1]}, {span}: {match[2].replace('_', ' ')}",
            [evaluation_mean(row, name) for row in found],
            [f"at step {step}" for step in steps],
            MAIN_SCORES[match[2]],
        )
        yield _of_evaluation(name, score, setup.checkpoint(steps[score.best]), setup)


def _of_evaluation(name: str, score: Score, kept: str, setup: Setup) -> Finding:
    """Return what became of a metric's score; `kept` is the checkpoint of its best weights."""
    finding = _finding(score, setup, f" ({kept or 'no checkpoint of it is kept'})")
    if not score.has_lost or finding.mood not in ("mixed", "bad"):
        return finding
    if kept:
        said = f"Use {kept}, which has the weights of the best evaluation"
    else:
        said = f'Set run.best = "{name}", which keeps the weights of the best evaluation'
    return finding._replace(advice=(said, *finding.advice))


def _in_training(steps: Sequence[Row], setup: Setup) -> Iterator[Finding]:
    """Yield a finding on the score that the recipe trains for, over fifths of the steps."""
    parts_of = {name: fifths(steps, name) for name in IN_TRAINING}
    name = next((name for name, parts in parts_of.items() if len(parts) > 1), None)
    if name is None:
        return
    what, better = IN_TRAINING[name]
    parts = parts_of[name]
    means = [mean_of(part, name) for part in parts]
    score = Score(f"{what}:", means, [_place(part) for part in parts], better)
    found, more = _finding(score, setup), setup.named("steps")
    if score.still_improves and more and steps[-1]["step"] == setup.settings["steps"]:
        found = found._replace(advice=(f"It still improves at the end: raise {more}",))
    yield found


def _place(rows: Sequence[Row]) -> str:
    first, last = rows[0]["step"], rows[-1]["step"]
    return f"at step {first}" if first == last else f"in steps {first} to {last}"


def _parts(steps: Sequence[Row]) -> Iterator[Finding]:
    """Yield what became of the other values that a reward function returned."""
    names = {name for row in steps for name in row if name.startswith("reward/")}
    for name in sorted(names - METRIC_OF_NAME.keys()):
        parts = fifths(steps, name)
        if len(parts) > 1:
            first, last = mean_of(parts[0], name), mean_of(parts[-1], name)
            what = f"Reward part {name.partition('/')[2]}:"
            yield Finding("", f"{what} {_first_and_last(first, last)[1]}")


def _finding(score: Score, setup: Setup, of_best: str = "") -> Finding:
    """Return what became of a score: first against now, and its best; `of_best` is said of that."""
    last, best = score.means[-1], score.means[score.best]
    mood, text = _first_and_last(score.means[0], last, score.better)
    if score.is_past_best and (mood == "good" or last.differs(best)):
        away = "down" if score.better > 0 else "up"
        noise = "" if last.differs(best) else ", within the noise"
        text += f"; {away} from its best, {best} {score.places[score.best]}{of_best}{noise}"
    elif mood == "good":
        text += ", and is at its best"
    if score.has_lost:
        mood = "mixed" if mood == "good" else "bad" if last.differs(best) else mood
    return Finding(mood, f"{score.what} {text}", setup.slower if mood in ("bad", "mixed") else ())


def _first_and_last(first: Mean, last: Mean, better: int = 1) -> tuple[Mood, str]:
    """Return the mood and the words of two means."""
    both = f"{first} → {last}"
    if first.value == last.value:
        return "flat", f"{both}: no change"
    if math.isnan(first.noise(last)):
        return "", f"{both}; the noise is not known"
    if not last.differs(first):
        return "flat", f"{both}: no change beyond {MIN_STANDARD_ERRORS:g} standard errors"
    is_up = last.value > first.value
    return ("good" if is_up == (better > 0) else "bad"), f"{both}: it {'rose' if is_up else 'fell'}"


def _of_all(
    rows: Sequence[Row], scores: Sequence[Finding], looks: Sequence[Finding], setup: Setup
) -> Iterator[Finding]:
    """Yield what the run as a whole asks for, after the findings on scores and signs of trouble."""
    moods = {one.mood for one in scores}
    done, planned = max((row["step"] for row in rows), default=0), setup.settings.get("steps")
    if isinstance(planned, int) and 0 < done < planned:
        yield Finding("", f"{done:,} of {planned:,} steps are done")
    stands_still = "flat" in moods and not {"good", "bad", "mixed"} & moods and not looks
    if stands_still and (rate := setup.named("trainer.lr")):
        yield Finding("", "", (f"Multiply {rate} by three, or take more steps: {NOT_MOVING}",))
    has_evaluation = any(name.startswith("eval/") for row in rows for name in row)
    if done > 0 and not has_evaluation and "eval.every" in setup.settings:
        yield Finding(
            "",
            "",
            (
                "Name held-out data in eval.data: nothing was evaluated on prompts that it does "
                "not train on (docs/watching.md#evaluations)",
            ),
        )
