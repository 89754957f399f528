"""Page of a report: one HTML file without scripts, in the style of a run's report."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from typing import Any

from spmd_rl.microscope.diagnose.compare import name_in_sentence
from spmd_rl.microscope.page import svg
from spmd_rl.microscope.taps.points import OPS, Point
from spmd_rl.report.page import policy_hash

MAX_TOKENS = 24  # in a table
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src '{hash}'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="spmd-rl mismatch">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body><main>
{body}
</main></body>
</html>
"""


def render(data: dict[str, Any]) -> str:
    """Return the page of `report_data.as_data`."""
    style = _style()
    title = f"{data['left']} against {data['right']}"
    body = "\n".join(
        [_head(data, title), *(_sections(data) if data["findings"] else ()), _facts(data)]
    )
    return _PAGE.format(hash=policy_hash(style), title=html.escape(title), style=style, body=body)


def _style() -> str:
    shared = resources.files("spmd_rl.report.page") / "style.css"
    page_style = resources.files("spmd_rl.microscope.page") / "page.css"
    return shared.read_text(encoding="utf-8") + page_style.read_text(encoding="utf-8")


def _head(data: dict[str, Any], title: str) -> str:
    planted = (
        f"<p class='sub'>planted: {html.escape(data['planted'])}</p>" if data["planted"] else ""
    )
    kind = "card verdict" if data["agree"] else "card verdict parted"
    sentences = "".join(f"<p>{html.escape(line)}</p>" for line in data["verdict"].splitlines())
    notes = "".join(f"<p class='sub'>{html.escape(line)}</p>" for line in data["notes"])
    return f"<h1>{html.escape(title)}</h1>{planted}<div class='{kind}'>{sentences}</div>{notes}"


def _sections(data: dict[str, Any]) -> list[str]:
    sections = [_network(data)]
    if data["first"] is not None:
        sections.append(_first_difference(data))
    if data["unequal_logprobs"]:
        sections.append(_logprobs(data))
    causes = _section("What introduces a difference", "the first of each kind", _causes(data))
    sections.append(causes)
    growth = _figure("", svg.growth(data["findings"]))
    sections.append(_section("How it spreads", "share of elements that differ", growth))
    return sections


def _network(data: dict[str, Any]) -> str:
    legend = "".join(map(svg.key, ("equal", "inherited", "introduced")))
    patched = html.escape(name_in_sentence(data["fed"]))
    note = f"{legend} introduced: an op of {patched}, given the other side's input, still differs"
    picture = _figure("every op of every layer", svg.network_map(data["findings"]))
    return _section("The network", note, picture)


def _first_difference(data: dict[str, Any]) -> str:
    first, last = data["first"], data["findings"][-1]
    strips = _figure(
        "rows that differ (wide: prompt, narrow: response; grey: equal, or not computed)",
        svg.strips(first["positions"], data["sequences"]),
    )
    histograms = _figure(
        f"{_name(first)} on the same input, by ULP", svg.distances(first["on_same_input"])
    )
    if last["op"] == "logprob":
        histograms += _figure("log-probs as the sides ran, by ULP", svg.distances(last["plain"]))
    content = strips + f'<div class="two">{histograms}</div>'
    return _section("Where they part", _name(first), content)


def _causes(data: dict[str, Any]) -> str:
    """Return a table of the first finding of each op that introduces a difference."""
    causes = {(finding["layer"], finding["op"]): finding for finding in data["causes"]}
    introduced = [one for one in data["findings"] if one["status"] == "introduced"]
    num_places = Counter(one["op"] for one in introduced)
    rows: dict[str, list[str]] = {}
    for finding in introduced:
        op, cause = finding["op"], causes.get((finding["layer"], finding["op"]))
        places = f"{num_places[op]} place{'s' * (num_places[op] > 1)}"
        found = finding["on_same_input"]
        counts, largest = found["counts"], found["largest_ulp"]
        row = [
            f"{_name(finding)}<br><small>{html.escape(OPS[op])}; in {places}</small>",
            f"{sum(counts[1:]):,} of {sum(counts):,}, at most {largest:,} ULP",
            *(_side(cause[side]) if cause else "" for side in ("left", "right")),
        ]
        rows.setdefault(op, row)
    heads = ("op", "elements that differ on the same input", data["left"], data["right"])
    return _html_table(heads, list(rows.values()))


def _logprobs(data: dict[str, Any]) -> str:
    tokens = data["unequal_logprobs"]
    note = f"{len(tokens):,} tokens" + (
        f", the first {MAX_TOKENS}" if len(tokens) > MAX_TOKENS else ""
    )
    rows = [_logprob_cells(token) for token in tokens[:MAX_TOKENS]]
    heads = (
        "sequence",
        "position",
        "token of the response",
        data["left"],
        data["right"],
        "recorded",
    )
    return _section("Log-probs that differ", note, _html_table(heads, rows))


def _logprob_cells(token: dict[str, Any]) -> list[str]:
    return [
        html.escape(token["sequence"]),
        str(token["position"]),
        f"{token['response_token']}: "
        f"<span class='mono'>{html.escape(repr(token['text']))}</span> ({token['token']})",
        *map(_logprob, (token["left"], token["right"], token["recorded"])),
    ]


def _logprob(value: float | None) -> str:
    return "" if value is None else f"<span class='mono'>{value:.9g}</span>"


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. Its cells are HTML already."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" for cells in rows
    )
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="card scroll"><table>{table}</table></div>'


def _side(side: dict[str, list[str]]) -> str:
    lines = [
        *map(html.escape, side["kernels"]),
        *(f"<b>{html.escape(line)}</b>" for line in side["arithmetic"]),
    ]
    return "<br>".join(lines)


def _facts(data: dict[str, Any]) -> str:
    rows = [
        [f"<b>{html.escape(name)}</b>", f"<span class='mono'>{html.escape(value)}</span>"]
        for name, value in _list_facts(data).items()
        if value
    ]
    facts_table = _html_table(("what", ""), rows)
    return _section("What was replayed", "", _sequences(data["sequences"]) + facts_table)


def _list_facts(data: dict[str, Any]) -> dict[str, str]:
    """Return the facts on a replay by name; those that do not apply are empty."""
    return {
        "run": data["run"],
        "command": data["command"],
        "weights": data["weights"],
        "sequences": f"{len(data['sequences'])}, "
        f"{data['compared_rows']:,} rows compared at {data['points']} points",
        "recorded log-probs": data["recorded"]["says"] if data["recorded"] else "",
        **{
            f"{name_in_sentence(name)} went through": ", ".join(
                f"{what}: {count:,}" for what, count in facts.items()
            )
            for name, facts in data["facts"].items()
            if facts
        },
        **data["versions"],
    }


def _sequences(sequences: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            html.escape(sequence["name"]),
            f"{sequence['prompt_tokens']:,} + {sequence['response_tokens']:,}",
            f"<span class='mono'>{html.escape(sequence['prompt'])}"
            f"<b>{html.escape(sequence['response'])}</b></span>",
        ]
        for sequence in sequences
    ]
    return _html_table(("sequence", "tokens", "prompt and response"), rows)


def _name(finding: dict[str, Any]) -> str:
    return str(Point(finding["layer"], finding["op"]))


def _section(title: str, note: str, content: str) -> str:
    head = f'<div class="head"><h2>{title}</h2><span class="note">{note}</span></div>'
    return f'<section class="section">{head}{content}</section>'


def _figure(caption: str, picture: str) -> str:
    return f'<figure class="card"><figcaption>{caption}</figcaption>{picture}</figure>'
