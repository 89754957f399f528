"""Test of the microscope on SGLang: where its forward pass parts from ours, and by how much.

The model has six layers of Qwen3-0.6B's shapes in bfloat16 and random weights. SGLang computes the
sequences twice in processes of its own, without and with its deterministic mode. Every op of the
trainer then runs on SGLang's inputs. A planted row shows that a changed MLP is named.

    python -m benchmarks.mismatch_sglang --site /path/of/sglang [--options JSON] [--save]
        [--figures FILE] [--pages DIR]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.mismatch import DEVICE, DTYPE, NUM_LAYERS, sequences, write_model
from benchmarks.record import finish, gpu, gpu_machine, measured
from benchmarks.table import Row
from spmd_rl.microscope.examine import Examination, ReplaySetup, examine
from spmd_rl.microscope.foreign.dump import Dump
from spmd_rl.microscope.foreign.dump_pass import DumpPass
from spmd_rl.microscope.foreign.sglang_side import SglangSide, write_sglang_dump
from spmd_rl.microscope.page.report_data import as_data, write_report
from spmd_rl.microscope.page.tolerance import first_beyond
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.sides import ROUNDING, SGLANG, forward_pass
from spmd_rl.model.read import read_spec

TOLERANCE = ROUNDING[DTYPE]
PLANTED_LAYER = NUM_LAYERS // 2


class Comparisons:
    """Our passes beside SGLang's, over one model and one case."""

    def __init__(self, folder: Path, temporary: Path, options: argparse.Namespace) -> None:
        self.folder, self.temporary, self.options = folder, temporary, options
        self.case: ReplayCase = sequences(read_spec(folder).vocab_size)
        self.seconds: dict[str, float] = {}

    def sglang(self, name: str) -> DumpPass:
        """Return SGLang's side, once its process has computed it."""
        side = SglangSide(self.options.site, json.loads(self.options.options), name == SGLANG[1])
        began_s = time.monotonic()
        path = write_sglang_dump(side, self.case, self.folder, DTYPE, self.temporary / name)
        self.seconds[name] = time.monotonic() - began_s
        return DumpPass(Dump(path, read_spec(self.folder)), DEVICE, name)

    def compare(self, ours: str, recorded: DumpPass, planted: bool = False) -> Examination:
        own = forward_pass(ours, self.folder, DTYPE, DEVICE, {}, share_prompts=False)
        if planted:
            weight = own.model.model.layers[PLANTED_LAYER].mlp.gate_proj.weight
            weight.copy_(weight.flip(0).clone())
        setup = ReplaySetup(self.case, own, recorded, str(self.folder), tolerance=TOLERANCE)
        return examine(setup)


def rows(name: str, found: Examination) -> Iterator[Row]:
    """Yield what a comparison found. It holds if every op is within rounding on SGLang's input."""
    comparison = found.comparison
    largest = max((one.largest_share for one in comparison.results), default=0.0)
    yield measured(
        f"{name}: largest share of a row's largest output", largest, "", at_most=TOLERANCE
    )
    first = comparison.first_introduced
    yield measured(
        f"{name}: outputs that differ at {first.point if first else 'no point'}, the first",
        first.same_input.unequal if first else 0,
        f"of {first.same_input.total:,}" if first else "",
    )
    kinds = {one.point.op for one in comparison.results if one.status == "introduced"}
    yield measured(f"{name}: kinds of op that differ ({', '.join(sorted(kinds))})", len(kinds), "")
    if comparison.logprobs is not None:
        differences = (comparison.logprobs.left - comparison.logprobs.right).abs()
        yield measured(f"{name}: mean difference of a log-prob", float(differences.mean()), "nats")
        yield measured(
            f"{name}: largest difference of a log-prob", float(differences.max()), "nats"
        )


def planted_row(found: Examination) -> Row:
    first = first_beyond(found.comparison, TOLERANCE)
    where = str(first.point) if first else "nowhere"
    expected = {f"layer {PLANTED_LAYER} {op}" for op in ("gate_proj", "act")}
    beyond = {one.point.layer for one in found.comparison.results if one.largest_share > TOLERANCE}
    return Row(
        what=f"another gate_proj in layer {PLANTED_LAYER} of the trainer: named {where}",
        value=first.largest_share if first else 0.0,
        unit="of a row's largest output",
        bar="named, and no other layer",
        holds=where in expected and beyond == {PLANTED_LAYER},
    )


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    lines: list[Row] = []
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(Path(temporary) / "model")
        comparisons = Comparisons(folder, Path(temporary), options)
        for name in SGLANG:
            recorded = comparisons.sglang(name)
            for ours in ("trainer", "engine") if name == SGLANG[0] else ("trainer",):
                found = comparisons.compare(ours, recorded)
                print(f"{ours}, {name}: {found.verdict}", flush=True)
                lines += rows(f"{ours}, {name}", found)
                details[f"{ours}, {name}"] = as_data(found)
                if options.pages:
                    write_report(found, Path(options.pages))
        lines.append(planted_row(comparisons.compare("trainer", recorded, planted=True)))
        for name, seconds in comparisons.seconds.items():
            lines.append(measured(f"{name}: start and all sequences", seconds, "s"))
    if options.figures:
        found_rows = [{"what": row.what, "value": row.value, "holds": row.holds} for row in lines]
        Path(options.figures).write_text(json.dumps({"rows": found_rows, "data": details}))
    if DEVICE.type == "cpu":
        return finish(__file__, ("torch",), lines, save=options.save)
    facts = gpu()
    packages = ("torch", "triton")
    versions = {"sglang": recorded.dump.metadata["program"].removeprefix("sglang ")}
    return finish(
        __file__, packages, lines, save=options.save, machine=gpu_machine(), **facts, **versions
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.mismatch_sglang")
    parser.add_argument("--site", default="", help="SGLang's interpreter or folder of packages")
    parser.add_argument("--options", default='{"attention_backend": "triton"}')
    parser.add_argument("--figures", help="a JSON file of the rows and all findings")
    parser.add_argument("--pages", help="a folder for the pages")
    parser.add_argument("--save", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
