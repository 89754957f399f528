"""Pictures of a page, as SVG text."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from spmd_rl.microscope.diagnose.ulp import Histogram
from spmd_rl.microscope.taps.points import OPS, Point

CELL, LABEL, TOP, BAR = 18, 92, 22, 40
HISTOGRAM = 130  # the height of its tallest bar
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
    layers = sorted({finding["layer"] for finding in findings})
    ops = [op for op in OPS if any(finding["op"] == op for finding in findings)]
    first = next((finding for finding in findings if finding["status"] == "introduced"), None)
    parts = _map_labels(layers, ops)
    for finding in findings:
        x, y = LABEL + CELL * layers.index(finding["layer"]), TOP + CELL * ops.index(finding["op"])
        parts.append(
            _cell(x + 1, y + 1, CELL - 2, CELL - 2, finding["status"], _map_title(finding))
        )
        if finding is first:
            size = f'width="{CELL}" height="{CELL}"'
            parts.append(f'<rect class="first" x="{x}" y="{y}" {size} rx="3"/>')
    return _svg(LABEL + CELL * len(layers) + 8, TOP + CELL * len(ops) + 4, parts)


def _map_labels(layers: Sequence[int], ops: Sequence[str]) -> list[str]:
    columns = [
        _text(LABEL + CELL * x + CELL / 2, 14, _layer_name(layer, layers), "middle")
        for x, layer in enumerate(layers)
    ]
    rows = [_text(LABEL - 8, TOP + CELL * y + 13, op, "end") for y, op in enumerate(ops)]
    return columns + rows


def _map_title(finding: dict[str, Any]) -> str:
    return (
        f"{Point(finding['layer'], finding['op'])}: {finding['status']}, "
        f"{finding['unequal_rows']} of {finding['rows']} rows differ, "
        f"{finding['introduced_rows']} on the same input"
    )


def distances(histogram: dict[str, Any]) -> str:
    """Draw the counts of elements by distance in ULP, on a square-root scale.

    A bar counts the distances from its own number up to that of the next bar.
    """
    counts = histogram["counts"][1:]
    if not any(counts):
        return "<p>all elements are equal</p>"
    bars, top = [], max(counts)
    for bucket, count in enumerate(counts, 1):
        bars += _bar(bucket, count, HISTOGRAM * (count / top) ** 0.5)
    equal = (
        f"{histogram['counts'][0]:,} elements equal, {sum(counts):,} apart, "
        f"at most {histogram['largest_ulp']:,} ULP"
    )
    return _svg(max(260, BAR * len(counts)), HISTOGRAM + 40, bars) + f"<p>{equal}</p>"


def _bar(bucket: int, count: int, height: float) -> list[str]:
    """Return a bar of a histogram with its count above and its distance below."""
    x = BAR * (bucket - 1)
    title = f"{Histogram.label(bucket)} ULP: {count:,} elements"
    return [
        _cell(x + 4, HISTOGRAM + 18 - height, BAR - 8, height, "introduced", title),
        _text(x + BAR / 2, HISTOGRAM + 12 - height, _brief(count), "middle"),
        _text(x + BAR / 2, HISTOGRAM + 34, _power(bucket - 1), "middle"),
    ]


def strips(positions: dict[str, list[int]], sequences: Sequence[dict[str, Any]]) -> str:
    """Draw a strip for each sequence: its prompt, its response, and the rows that differ.

    Sequences that differ come first.
    """
    ordered = sorted(sequences, key=lambda sequence: sequence["name"] not in positions)
    shown, hidden = ordered[:MAX_STRIPS], ordered[MAX_STRIPS:]
    longest = max(map(_num_tokens, sequences))
    unit, parts = STRIP / longest, []
    for y, sequence in enumerate(shown):
        parts += _strip(sequence, positions.get(sequence["name"], []), 18 * y, unit)
    if hidden:
        differ = sum(sequence["name"] in positions for sequence in hidden)
        note = f"{len(hidden)} more not shown, {differ} of them differ"
        parts.append(_text(LABEL, 18 * len(shown) + 12, note, "start"))
    return _svg(LABEL + STRIP + 90, 18 * (len(shown) + bool(hidden)) + 4, parts)


def _num_tokens(sequence: dict[str, Any]) -> int:
    return int(sequence["prompt_tokens"]) + int(sequence["response_tokens"])


def _strip(
    sequence: dict[str, Any], positions: Sequence[int], top: float, unit: float
) -> list[str]:
    prompt, length = sequence["prompt_tokens"], _num_tokens(sequence)

    def piece(start: int, width: float, status: str, title: str) -> str:
        y, height = (top + 2, 12) if start < prompt else (top + 5, 6)
        return _cell(LABEL + unit * start, y, width, height, status, title)

    return [
        _text(LABEL - 8, top + 12, sequence["name"], "end"),
        piece(0, unit * prompt, "unseen", "prompt"),
        piece(prompt, unit * (length - prompt), "unseen", "response"),
        *(piece(at, max(unit - 0.5, 0.8), "introduced", f"position {at}") for at in positions),
        _text(LABEL + unit * length + 6, top + 12, f"{len(positions)} of {length}", "start"),
    ]


def growth(findings: Sequence[dict[str, Any]]) -> str:
    """Draw the share of elements that differ at each point, in the order of the forward pass."""
    shares = [_unequal_share(finding) for finding in findings]
    step = STRIP / max(len(shares) - 1, 1)
    at = " ".join(
        f"{LABEL + step * x:.1f},{110 - 100 * share:.1f}" for x, share in enumerate(shares)
    )
    axes = [_axis(10, "100 %"), _axis(60, "50 %"), _axis(110, "0 %")]
    parts = [*axes, *_layer_ticks(findings, step), f'<polyline class="line" points="{at}"/>']
    return _svg(LABEL + STRIP + 40, 132, parts)


def _layer_ticks(findings: Sequence[dict[str, Any]], step: float) -> list[str]:
    """Return the names of some layers, each at the first point of the layer."""
    layers = sorted({finding["layer"] for finding in findings})
    labelled = set(layers[:: -(-len(layers) // MAX_TICKS)])
    ticks = []
    for x, finding in enumerate(findings):
        layer = finding["layer"]
        if layer in labelled:
            labelled.remove(layer)
            ticks.append(_text(LABEL + step * x, 126, _layer_name(layer, layers), "start"))
    return ticks


def _unequal_share(finding: dict[str, Any]) -> float:
    counts: list[int] = finding["plain"]["counts"]
    return 1 - counts[0] / max(sum(counts), 1)


def _axis(y: int, label: str) -> str:
    line = f'<line class="axis" x1="{LABEL}" x2="{LABEL + STRIP}" y1="{y}" y2="{y}"/>'
    return line + _text(LABEL - 8, y + 4, label, "end")


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


def _cell(x: float, y: float, width: float, height: float, status: str, title: str) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {box} rx="2" class="{status}"><title>{html.escape(title)}</title></rect>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg {size} role="img">{"".join(parts)}</svg>'
