"""Pictures of a page, as SVG text."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from spmd_rl.microscope.diagnose.ulp import Histogram
from spmd_rl.microscope.taps.points import OPS, Point

CELL, LABEL, TOP, BAR = 18, 92, 22, 40
MAX_STRIPS, STRIP, MAX_TICKS = 24, 720, 20


def key(status: str) -> str:
    box = (
        f'<svg width="12" height="12"><rect width="12" height="12" rx="3" class="{status}"/></svg>'
    )
    return f'<span class="key">{box}{status}</span>'


def network_map(findings: Sequence[dict[str, Any]]) -> str:
    """Draw a cell for each op (down) and layer (across), coloured by its status.

    The first cell that introduces a difference has a frame.
    """
    layers = sorted({one["layer"] for one in findings})
    ops = [op for op in OPS if any(one["op"] == op for one in findings)]
    first = next((one for one in findings if one["status"] == "introduced"), None)
    parts = [
        _text(LABEL + CELL * x + CELL / 2, 14, _layer_name(layer, layers), "middle")
        for x, layer in enumerate(layers)
    ]
    parts += [_text(LABEL - 8, TOP + CELL * y + 13, op, "end") for y, op in enumerate(ops)]
    for one in findings:
        x, y = LABEL + CELL * layers.index(one["layer"]), TOP + CELL * ops.index(one["op"])
        point = Point(one["layer"], one["op"])
        said = f"{point}: {one['status']}, {one['unequal_rows']} of {one['rows']} rows differ"
        said += f", {one['introduced_rows']} on the same input"
        parts.append(_cell(x + 1, y + 1, CELL - 2, CELL - 2, one["status"], said))
        if one is first:
            parts.append(
                f'<rect class="first" x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="3"/>'
            )
    return _svg(LABEL + CELL * len(layers) + 8, TOP + CELL * len(ops) + 4, parts)


def distances(one: dict[str, Any]) -> str:
    """Draw the counts of elements by distance in ULP, on a square-root scale.

    A bar counts the distances from its own number up to that of the next bar.
    """
    counts = one["counts"][1:]
    if not any(counts):
        return "<p>all elements are equal</p>"
    height, top = 130, max(counts)
    bars = []
    for bucket, count in enumerate(counts, 1):
        x, tall = BAR * (bucket - 1), height * (count / top) ** 0.5
        said = f"{Histogram.label(bucket)} ULP: {count:,} elements"
        bars.append(_cell(x + 4, height + 18 - tall, BAR - 8, tall, "introduced", said))
        bars.append(_text(x + BAR / 2, height + 12 - tall, _brief(count), "middle"))
        bars.append(_text(x + BAR / 2, height + 34, _power(bucket - 1), "middle"))
    equal = (
        f"{one['counts'][0]:,} elements equal, {sum(counts):,} apart, "
        f"at most {one['largest_ulp']:,} ULP"
    )
    return _svg(max(260, BAR * len(counts)), height + 40, bars) + f"<p>{equal}</p>"


def strips(positions: dict[str, list[int]], sequences: Sequence[dict[str, Any]]) -> str:
    """Draw a strip for each sequence: its prompt, its response, and the rows that differ.

    Sequences that differ come first.
    """
    ordered = sorted(sequences, key=lambda one: one["name"] not in positions)
    shown, hidden = ordered[:MAX_STRIPS], ordered[MAX_STRIPS:]
    longest = max(one["prompt_tokens"] + one["response_tokens"] for one in sequences)
    unit, parts = STRIP / longest, []
    for y, one in enumerate(shown):
        parts += _strip(one, positions.get(one["name"], []), 18 * y, unit)
    if hidden:
        differ = sum(one["name"] in positions for one in hidden)
        parts.append(
            _text(
                LABEL,
                18 * len(shown) + 12,
                f"{len(hidden)} more not shown, {differ} of them differ",
                "start",
            )
        )
    return _svg(LABEL + STRIP + 90, 18 * (len(shown) + bool(hidden)) + 4, parts)


def _strip(one: dict[str, Any], positions: Sequence[int], top: float, unit: float) -> list[str]:
    prompt, length = one["prompt_tokens"], one["prompt_tokens"] + one["response_tokens"]

    def piece(start: int, width: float, status: str, said: str) -> str:
        y, height = (top + 2, 12) if start < prompt else (top + 5, 6)
        return _cell(LABEL + unit * start, y, width, height, status, said)

    return [
        _text(LABEL - 8, top + 12, one["name"], "end"),
        piece(0, unit * prompt, "unseen", "prompt"),
        piece(prompt, unit * (length - prompt), "unseen", "response"),
        *(piece(at, max(unit - 0.5, 0.8), "introduced", f"position {at}") for at in positions),
        _text(LABEL + unit * length + 6, top + 12, f"{len(positions)} of {length}", "start"),
    ]


def growth(findings: Sequence[dict[str, Any]]) -> str:
    """Draw the share of elements that differ at each point, in the order of the forward pass."""
    shares = [
        1 - one["plain"]["counts"][0] / max(sum(one["plain"]["counts"]), 1) for one in findings
    ]
    step = STRIP / max(len(shares) - 1, 1)
    at = " ".join(
        f"{LABEL + step * x:.1f},{110 - 100 * share:.1f}" for x, share in enumerate(shares)
    )
    parts = [
        f'<line class="axis" x1="{LABEL}" x2="{LABEL + STRIP}" y1="{y}" y2="{y}"/>'
        + _text(LABEL - 8, y + 4, label, "end")
        for y, label in ((10, "100 %"), (60, "50 %"), (110, "0 %"))
    ]
    layers = sorted({one["layer"] for one in findings})
    named = layers[:: -(-len(layers) // MAX_TICKS)]
    for x, (one, before) in enumerate(zip(findings, [None, *findings], strict=False)):
        if one["layer"] in named and (before is None or one["layer"] != before["layer"]):
            parts.append(_text(LABEL + step * x, 126, _layer_name(one["layer"], layers), "start"))
    return _svg(LABEL + STRIP + 40, 132, [*parts, f'<polyline class="line" points="{at}"/>'])


def _layer_name(layer: int, layers: Sequence[int]) -> str:
    return {layers[0]: "in", layers[-1]: "out"}.get(layer, str(layer))


def _brief(count: int) -> str:
    if count < 10_000:
        return f"{count:,}"
    return f"{count / 1e3:.3g}k" if count < 1_000_000 else f"{count / 1e6:.3g}M"


def _power(exponent: int) -> str:
    """Return 2 ** exponent as text, like 4k for 4096."""
    size, unit = divmod(exponent, 10)
    return f"{1 << unit}{'kMG'[size - 1] if size else ''}"


def _cell(x: float, y: float, width: float, height: float, status: str, said: str) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {box} rx="2" class="{status}"><title>{html.escape(said)}</title></rect>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg {size} role="img">{"".join(parts)}</svg>'
