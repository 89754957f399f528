"""Compared tokens: how many of the engine's tokens the trainer's log-probs were compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COMPARED, MISMATCHED = "onpolicy/compared_tokens", "onpolicy/mismatched_tokens"
DRAWN, SHARE = "onpolicy/drawn_tokens", "onpolicy/compared_share"
NONE_COMPARED = "no tokens compared: none was drawn by the weights in training"


def mismatch_text(metrics: Mapping[str, float]) -> str:
    """Return what a step's line says of mismatches, such as `mismatched 0 of 512 (10 % compared)`.

    It is empty where a step had no engine.
    """
    if MISMATCHED not in metrics or COMPARED not in metrics:
        return ""
    if not metrics[COMPARED]:
        return "none compared" if metrics.get(DRAWN) else ""
    text = f"mismatched {metrics[MISMATCHED]:,.0f} of {metrics[COMPARED]:,.0f}"
    share = metrics.get(SHARE, 1.0)
    return text if share == 1 else f"{text} ({percent(share)} compared)"


def closing_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a sentence for the end of a run that did not compare all its tokens, else "".

    `rows` are its steps.
    """
    known = [row for row in rows if row.get(DRAWN)]
    drawn, compared = (sum(row.get(name) or 0 for row in known) for name in (DRAWN, COMPARED))
    if compared == drawn:
        return ""
    if not compared:
        return (
            f"no token was compared with the engine's log-probs: none of the {drawn:,.0f} in "
            "training was drawn by the weights of its step, so nothing is known of mismatches"
        )
    return (
        f"{compared:,.0f} of {drawn:,.0f} tokens ({percent(compared / drawn)}) were compared with "
        "the engine's log-probs: the others were drawn by older weights"
    )


def total_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how many tokens of a run differed; "" where the trainer is compared with no engine."""
    compared_rows = [row for row in rows if row.get(COMPARED) != 0]
    total, compared = (
        sum(row.get(name) or 0 for row in compared_rows) for name in (MISMATCHED, COMPARED)
    )
    if all(row.get(MISMATCHED) is None for row in rows):
        return ""
    if not compared and not total:
        return "no tokens compared"
    return f"{total:,.0f} {f'of {compared:,.0f} ' if compared else ''}tokens mismatched"


def percent(share: float) -> str:
    """Return a share such as `10 %`; one that is not whole is never shown as all or nothing."""
    text = f"{100 * share:.0f} %"
    if text == "0 %" and share > 0:
        return "under 1 %"
    return "over 99 %" if text == "100 %" and share < 1 else text
