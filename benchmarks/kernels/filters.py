"""Draws and log-probs with top-k, top-p or min-p, compared with a sort: microseconds.

Rows are those of a decoding step over Qwen3's vocabulary. Flat logits are normal: a nucleus of 0.95
is most of the vocabulary. Peaked logits are normal times eight, so that the nucleus is a few
entries, as it mostly is in a language model. The sort's version is torch's descending sort, a
softmax and its running sum, exponential noise and argmax, then log_softmax. Each number is the
median over replays of a graph that runs the op for eight inputs, larger than L2. Ours and the
sort's take turns.

    python -m benchmarks.kernels.filters [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.kernels.timing import in_turns
from benchmarks.record import compared, finish, gpu, measured
from benchmarks.shapes import VOCAB
from benchmarks.table import Row
from spmd_rl.kernels import sample_and_score

ROWS = (1, 64, 256)
SPREADS = {"flat": 1.0, "peaked": 8.0}
INPUTS = 8
TOP_K, TOP_P, MIN_P = 50, 0.95, 0.05


def by_sort(
    logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    ordered, order = logits.sort(dim=-1, descending=True)
    dropped = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k is not None:
        dropped |= torch.arange(logits.shape[1], device=logits.device) >= top_k.unsqueeze(1)
    probs = ordered.masked_fill(dropped, -torch.inf).softmax(-1)
    if top_p is not None:
        dropped |= probs.cumsum(-1) - probs >= top_p.unsqueeze(1)
    if min_p is not None:
        dropped |= probs < min_p.unsqueeze(1) * probs[:, :1]
    kept = logits.masked_fill(torch.zeros_like(dropped).scatter_(1, order, dropped), -torch.inf)
    drawn = (kept - torch.empty_like(kept).exponential_().log_()).argmax(-1)
    return drawn, logits.log_softmax(-1).gather(1, drawn.unsqueeze(1))


def measure(rows: int, kind: str) -> Iterator[Row]:
    one, keys = torch.ones(rows, device="cuda"), torch.arange(rows, device="cuda")
    inputs = [SPREADS[kind] * torch.randn(rows, VOCAB, device="cuda") for _ in range(INPUTS)]
    top_k, top_p, min_p = torch.full((rows,), TOP_K, device="cuda"), one * TOP_P, one * MIN_P
    asked = {
        f"top_p {TOP_P}": (None, top_p, None),
        f"top_k {TOP_K}": (top_k, None, None),
        "all three": (top_k, top_p, min_p),
    }
    what = f"{rows} rows of {kind} logits"
    plain = in_turns([lambda logits: sample_and_score(logits, one, keys, keys)], inputs, rounds=1)[
        0
    ]
    yield measured(f"{what}: all of the vocabulary", plain, "us")
    for name, filters in asked.items():
        named = dict(zip(("top_k", "top_p", "min_p"), filters, strict=True))
        ways = [
            lambda logits, named=named: sample_and_score(logits, one, keys, keys, **named),
            lambda logits, filters=filters: by_sort(logits, *filters),
        ]
        ours, theirs = in_turns(ways, inputs, rounds=1)
        yield compared(f"{what}: {name}", ours, "us", peer="torch's sort", peer_value=theirs)


@torch.no_grad()
def main() -> int:
    rows = [row for count in ROWS for kind in SPREADS for row in measure(count, kind)]
    return finish(
        __file__, ("torch", "triton"), rows, save="--save" in sys.argv, machine="h200", **gpu()
    )


if __name__ == "__main__":
    sys.exit(main())
