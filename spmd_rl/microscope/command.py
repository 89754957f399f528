"""`spmd-rl mismatch`: replay tokens through two forward passes, compare, and write a report."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.microscope import sides
from spmd_rl.microscope.examine import ReplaySetup, examine
from spmd_rl.microscope.foreign.inputs_file import write_inputs
from spmd_rl.microscope.limits import limits_of
from spmd_rl.microscope.options import check_sides, parse_options
from spmd_rl.microscope.page.report_data import write_report
from spmd_rl.microscope.ranks.rank_replay import RankReplay, SharedRole, ready_to_fork
from spmd_rl.microscope.replay import inputs
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.replay.inputs import RecordedSample
from spmd_rl.microscope.replay.weights import (
    ReplayWeights,
    final_weights,
    sampling_weights,
    step_to_confirm,
)
from spmd_rl.model.read import read_spec
from spmd_rl.observe.run_folder import refuse_links

EXIT_AGREE, EXIT_DIFFER = 0, 1


@dataclass(frozen=True)
class _RunInputs:
    """The run to replay, if there is one, with its settings, the case and the weights.

    `dropped_splits` says whether the settings had attention splits, which cannot run here.
    """

    run: Path | None
    settings: dict[str, Any]
    case: ReplayCase
    weights: ReplayWeights
    dropped_splits: bool

    @property
    def run_name(self) -> str:
        return str(self.settings.get("run", {}).get("name") or (self.run or Path()).name)


def main(words: list[str]) -> int:
    """`spmd-rl mismatch`: compare two forward passes over the same tokens.

    The exit code is 0 if all bits agree (with a tolerance, all but rounding), every sequence reads
    its own history and nothing is NaN; 1 if not; 2 for bad input; 3 if it could not be found out.
    """
    options = parse_options(words, main.__doc__)
    run = Path(options.run) if options.run else None
    settings = inputs.run_settings(run) if run else {}
    sides.require_chosen_program(options, settings)
    options.left = options.left or "engine"
    check_sides(options)
    folder = _report_folder(options, run)
    world = sides.world_of(options, sides.device_of(options))
    with TemporaryDirectory() as temporary:
        with ready_to_fork():
            loaded = _load(options, run, settings, Path(temporary))
            sides.refuse_mixture(options, read_spec(loaded.weights.folder))
            if options.write_inputs:
                return _write_inputs(loaded, sides.device_of(options), Path(options.write_inputs))
            _make_folder(folder)
            rank_replays = _replay_ranks(options, loaded, Path(temporary))
        with world as context:
            setup = _setup(options, loaded, words, Path(temporary), context, rank_replays)
            return _compare([setup, *(one.beside(setup) for one in rank_replays)], folder)


def _compare(setups: Sequence[ReplaySetup], folder: Path) -> int:
    """Examine the setups, write a report of each, print the verdicts, and return the exit code.

    Those that part come first.
    """
    for note in setups[0].notes:
        print(note)
    examinations = [examine(setup) for setup in setups]
    for examination in sorted(examinations, key=lambda one: one.agree):
        page = write_report(examination, folder)
        print(examination.verdict)
        print(page)
    return EXIT_AGREE if all(one.agree for one in examinations) else EXIT_DIFFER


def _write_inputs(loaded: _RunInputs, device: torch.device, path: Path) -> int:
    """Write what a foreign program needs, and say under which weights it is to compute."""
    try:
        beside = path.with_suffix(".weights")
        model = sides.folder_of(sides.DUMP, loaded.weights, loaded.settings, device, beside)
        write_inputs(loaded.case, model, path)
    except OSError as error:
        raise ConfigError(f"--write-inputs {path} cannot be written: {error.strerror}") from None
    print(f"{len(loaded.case.sequences)} sequences for {loaded.weights.description}")
    print(path)
    return EXIT_AGREE


def _report_folder(options: argparse.Namespace, run: Path | None) -> Path:
    """Return the folder of the report. It may lie in the run's, which must not have links then."""
    if options.out:
        return Path(options.out)
    if run:
        refuse_links(run)
    return (run or Path()) / "mismatch"


def _make_folder(path: Path) -> None:
    """Make the folder before the work is done.

    Raises: ConfigError if it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"nothing can be written to {path}")


def _load(
    options: argparse.Namespace, run: Path | None, settings: dict[str, Any], temporary: Path
) -> _RunInputs:
    """Load the case and choose the weights; those that are to be written go to `temporary`."""
    weights, samples = _named_weights(options), list[RecordedSample]()
    trainer = {} if weights else settings.get("trainer", {})
    if run is not None and not options.prompts:
        samples = _find_samples(options, run)
        if weights is None and options.step is not None:
            versions = _versions_of(samples)
            weights = sampling_weights(run, versions, settings, temporary / "model")
    weights = (weights or final_weights(run or Path())).on_base(trainer, temporary)
    if samples:
        case = inputs.case_of_samples(samples, weights.folder, settings)
    else:
        case = inputs.case_of_prompts(options.prompts, weights.folder)
    device, spec = sides.device_of(options), read_spec(weights.folder)
    dtype, _ = sides.dtypes_of(options, device, settings)
    dropped = sides.drop_splits(settings, spec, dtype, device)
    return _RunInputs(run, settings, case, weights, dropped)


def _named_weights(options: argparse.Namespace) -> ReplayWeights | None:
    """Return the weights that --model names, if it is given."""
    if not options.model:
        return None
    return ReplayWeights(Path(options.model), f"the weights in {options.model}")


def _find_samples(options: argparse.Namespace, run: Path) -> list[RecordedSample]:
    names = [name.strip() for name in options.samples.split(",")]
    return inputs.find_samples(run, list(filter(None, names)), options.step)


def _versions_of(samples: Sequence[RecordedSample]) -> frozenset[int]:
    """Return the versions of the weights that drew the samples' tokens."""
    return frozenset().union(*(sample.versions for sample in samples))


def _setup(
    options: argparse.Namespace,
    loaded: _RunInputs,
    words: list[str],
    temporary: Path,
    context: RoleContext | None,
    rank_replays: Sequence[RankReplay],
) -> ReplaySetup:
    device = sides.device_of(options)
    dtypes = sides.dtypes_of(options, device, loaded.settings)
    notes = _notes(options, loaded)
    weights = loaded.weights
    settings, case = loaded.settings, loaded.case
    left, right = sides.forward_passes(
        options, settings, case, weights, dtypes, device, temporary, context
    )
    replayed = {one.role.side for one in rank_replays}
    limits = limits_of(settings, (options.left, options.right), case, weights.lora, replayed)
    return ReplaySetup(
        loaded.case,
        left,
        right,
        model=str(weights.folder),
        planted=options.plant,
        weights=weights.description,
        drew_samples=weights.drew_samples,
        other_step=step_to_confirm(loaded.run) if loaded.run and not options.prompts else None,
        command=shlex.join(["spmd-rl", "mismatch", *words]),
        run=loaded.run_name,
        notes=notes,
        limits=tuple(limits),
        doubt=_doubt(options, loaded, f"on {device.type} in {_list(*dtypes)}"),
        tolerance=sides.tolerance_of(options, left, right),
    )


def _replay_ranks(
    options: argparse.Namespace, loaded: _RunInputs, temporary: Path
) -> list[RankReplay]:
    """Replay the roles whose ranks share work on so many ranks.

    Those that fail are left out, and the verdict names what was not looked at.
    """
    if options.plant:
        return []
    device, weights = sides.device_of(options), loaded.weights
    dtypes = sides.dtypes_of(options, device, loaded.settings)
    replays = []
    for side, dtype in zip((options.left, options.right), dtypes, strict=True):
        role = SharedRole.of(loaded.settings, side)
        if role is None or not role.fits(device):
            continue
        folder = temporary / side
        replay = RankReplay(role, loaded.case, loaded.settings, weights, dtype, device, folder)
        if replay.record():
            replays.append(replay)
    return replays


def _notes(options: argparse.Namespace, loaded: _RunInputs) -> tuple[str, ...]:
    """Return sentences on what is replayed."""
    notes = inputs.tokenizer_notes(loaded.case)
    notes += sides.megatron_notes(options, loaded.settings)
    notes += sides.plain_notes(options, loaded.settings, loaded.weights.lora)
    if options.step is not None:
        notes.append(f"Replayed under {loaded.weights.description}.")
    if loaded.dropped_splits:
        notes.append(
            "The run's attention_split needs FlashAttention-4: "
            "both sides attend to all keys at once here."
        )
    return tuple(notes)


def _doubt(options: argparse.Namespace, loaded: _RunInputs, where: str) -> str:
    """Return what speaks against an agreement: the mismatches that the run itself counted."""
    if loaded.run is None or options.prompts:
        return ""
    counts = inputs.mismatched_tokens(loaded.run)
    if not counts:
        return ""
    return (
        f"But the run itself counted {sum(counts.values()):,} unequal tokens: "
        f"{inputs.list_by_step(counts)}. "
        f"{len(loaded.case.sequences):,} of its samples were replayed here, in another process, "
        f"{where} under {loaded.weights.description}. The unequal tokens may be of other samples "
        "(--step, --samples); if not, what differs from the run in these, or a push, is to blame."
    )


def _list(*dtypes: torch.dtype) -> str:
    return " and ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
