"""`spmd-rl mismatch`: replay tokens through two forward passes, compare, and write a report."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
from spmd_rl.microscope.replay.inputs import RecordedSample
from spmd_rl.microscope.replay.weights import (
    ReplayWeights,
    final_weights,
    sampling_weights,
    step_to_confirm,
)
from spmd_rl.microscope.sides import Replay
from spmd_rl.model.read import read_spec
from spmd_rl.observe.run_folder import refuse_links

EXIT_AGREE, EXIT_DIFFER = 0, 1


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
    world = sides.world_of(options)
    with TemporaryDirectory() as temporary:
        with ready_to_fork():
            replay = _load(options, run, settings, Path(temporary))
            sides.refuse_mixture(options, read_spec(replay.weights.folder))
            if options.write_inputs:
                return _write_inputs(replay, Path(options.write_inputs))
            _make_folder(folder)
            rank_replays = _replay_ranks(replay)
        with world as context:
            setup = _setup(replay, words, context, rank_replays)
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


def _write_inputs(replay: Replay, path: Path) -> int:
    """Write what a foreign program needs, and say under which weights it is to compute."""
    try:
        model = replay.folder_of(sides.DUMP, path.with_suffix(".weights"))
        write_inputs(replay.case, model, path)
    except OSError as error:
        raise ConfigError(f"--write-inputs {path} cannot be written: {error.strerror}") from None
    print(f"{len(replay.case.sequences)} sequences for {replay.weights.description}")
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
) -> Replay:
    """Load the case and choose the weights; those that are to be written go to `temporary`."""
    weights, samples = _named_weights(options), list[RecordedSample]()
    trainer = {} if weights else settings.get("trainer", {})
    if run is not None and not options.prompts:
        samples = _find_samples(options, run)
        if weights is None and options.step is not None:
            versions = frozenset().union(*(sample.versions for sample in samples))
            weights = sampling_weights(run, versions, settings, temporary / "model")
    weights = (weights or final_weights(run or Path())).on_base(trainer, temporary)
    if samples:
        case = inputs.case_of_samples(samples, weights.folder, settings)
    else:
        case = inputs.case_of_prompts(options.prompts, weights.folder)
    spec, (dtype, _) = read_spec(weights.folder), sides.dtypes_of(options, settings)
    dropped = sides.drop_splits(settings, spec, dtype, sides.device_of(options))
    return Replay(options, run, settings, case, weights, temporary, dropped)


def _named_weights(options: argparse.Namespace) -> ReplayWeights | None:
    """Return the weights that --model names, if it is given."""
    if not options.model:
        return None
    return ReplayWeights(Path(options.model), f"the weights in {options.model}")


def _find_samples(options: argparse.Namespace, run: Path) -> list[RecordedSample]:
    names = [name.strip() for name in options.samples.split(",")]
    return inputs.find_samples(run, list(filter(None, names)), options.step)


def _setup(
    replay: Replay,
    words: list[str],
    context: RoleContext | None,
    rank_replays: Sequence[RankReplay],
) -> ReplaySetup:
    options, run, weights = replay.options, replay.run, replay.weights
    left, right = replay.passes(context)
    replayed = {one.role.side for one in rank_replays}
    limits = limits_of(replay.settings, replay.dtypes, replay.case, weights.lora, replayed)
    name = replay.settings.get("run", {}).get("name") or (run or Path()).name
    return ReplaySetup(
        replay.case,
        left,
        right,
        model=str(weights.folder),
        planted=options.plant,
        weights=weights.description,
        drew_samples=weights.drew_samples,
        other_step=step_to_confirm(run) if run and not options.prompts else None,
        command=shlex.join(["spmd-rl", "mismatch", *words]),
        run=str(name),
        notes=_notes(replay),
        limits=tuple(limits),
        doubt=_doubt(replay),
        tolerance=sides.tolerance_of(options, left, right),
    )


def _replay_ranks(replay: Replay) -> list[RankReplay]:
    """Replay the roles whose ranks share work on so many ranks.

    Those that fail are left out, and the verdict names what was not looked at.
    """
    if replay.options.plant:
        return []
    replays = []
    for side, dtype in replay.dtypes.items():
        role = SharedRole.of(replay.settings, side)
        if role is not None and role.fits(replay.device):
            one = RankReplay(
                role,
                replay.case,
                replay.settings,
                replay.weights,
                dtype,
                replay.device,
                replay.temporary / side,
            )
            replays += [one] if one.record() else []
    return replays


def _notes(replay: Replay) -> tuple[str, ...]:
    """Return sentences on what is replayed."""
    options, weights = replay.options, replay.weights
    notes = inputs.tokenizer_notes(replay.case)
    notes += sides.megatron_notes(options, replay.settings)
    notes += sides.plain_notes(options, replay.settings, weights.lora)
    if options.step is not None:
        notes.append(f"Replayed under {weights.description}.")
    if replay.dropped_splits:
        notes.append(
            "The run's attention_split needs FlashAttention-4: "
            "both sides attend to all keys at once here."
        )
    return tuple(notes)


def _doubt(replay: Replay) -> str:
    """Return what speaks against an agreement: the mismatches that the run itself counted."""
    if replay.run is None or replay.options.prompts:
        return ""
    counts = inputs.mismatched_tokens(replay.run)
    if not counts:
        return ""
    dtypes = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in replay.dtypes.values())
    return (
        f"But the run itself counted {sum(counts.values()):,} unequal tokens: "
        f"{inputs.list_by_step(counts)}. "
        f"{len(replay.case.sequences):,} of its samples were replayed here, in another process, "
        f"on {replay.device.type} in {' and '.join(dtypes)} under {replay.weights.description}. "
        "The unequal tokens may be of other samples (--step, --samples); if not, what differs from "
        "the run in these, or a push, is to blame."
    )
