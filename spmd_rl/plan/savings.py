"""Settings that save memory on a GPU, in the order of what they cost.

First come layouts: engines that share their experts or their matrices over several ranks, and a
trainer that divides its experts, its sequences, its matrices, or the last two. The native engine
goes before SGLang, whose log-probs have other bits. Within a layout, settings of the trainer follow
by their cost in speed, and each is tried with smaller micro-batches too, which cost least. What a
recipe does not have, or what does not go with another setting, is refused when it is tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, product

from spmd_rl.model.layers.layer import Recompute

Flags = tuple[str, ...]
# Of the operations of a step, two of six are the forward pass, which "all" does again. "cheap"
# repeats no matrix product, and elementwise operations are too few to count.
EXTRA_OPERATIONS: dict[Recompute, float] = {"none": 0.0, "cheap": 0.0, "all": 2 / 6}
LEAST_MICRO_BATCH = 4096  # tokens; a smaller one makes matrices too small to be computed fast
CHEAP, ALL = (f"--trainer.backend.recompute={choice}" for choice in ("cheap", "all"))
WRAP = "--trainer.backend.wrap=layer"
FULL = tuple(
    f"--trainer.backend.model_options.recompute_{name}"
    for name in ("granularity=full", "method=uniform", "num_layers=1")
)
MOMENTS, MASTER = (f"--trainer.backend.offload={what}" for what in ("moments", "master"))
ACTIVATIONS = "--trainer.backend.offload_activations=true"
MICRO_BATCH = "--trainer.max_tokens={}"
SEQUENCES, MATRICES = "split.train.cp", "split.train.tp"
OTHER_BITS = "--run.exact=false"
OPERATIONS = f"{EXTRA_OPERATIONS['all']:.0%} more operations in a train step"
# what a setting costs, by its flag or its key
COSTS = {
    "trainer.max_tokens": "no operations, but more micro-batches",
    CHEAP: "elementwise operations once more",
    ALL: OPERATIONS,
    FULL[0]: OPERATIONS,
    WRAP: "weights are gathered layer by layer",
    MOMENTS: "each step copies the moments to the GPU and back",
    MASTER: "each step copies master weights and moments to the GPU and back",
    ACTIVATIONS: "each step copies activations to the host and back",
    "split.train.ep": "tokens go to the experts of other ranks",
    "split.train.cp": "ranks exchange keys and values of each layer",
    "split.train.tp": "ranks exchange sums in each layer",
    "split.infer.ep": "tokens go to the experts of other ranks",
    "split.infer.tp": "ranks of an engine exchange sums in each layer",
    OTHER_BITS: "engine and trainer have other bits",
}
SAVERS: tuple[Flags, ...] = (
    (),
    (CHEAP,),
    (ALL,),
    (ALL, WRAP),
    FULL,
    (MOMENTS, ALL),
    (MOMENTS, *FULL),
    (MASTER, ALL),
    (MASTER, ALL, ACTIVATIONS),
)
EXPERT_SIZES = (2, 4, 8, 16, 32, 64, 128)
MATRIX_SIZES = (2, 4, 8)  # ranks of one host


def layouts(kept: Collection[str], world_size: int) -> list[Flags]:
    """Return the layouts of a world, without settings in `kept`, which the run itself has set.

    The first is that of the run as it is.
    """
    return _without(kept, _layouts(world_size))


def savers(kept: Collection[str]) -> list[Flags]:
    """Return the settings of the trainer to try in a layout, without those in `kept`."""
    return _without(kept, SAVERS)


def smaller_batches(num_tokens: int, least: int) -> list[Flags]:
    """Return flags of micro-batches from `num_tokens` down to `least`, each half of the last.

    The first are none: the run's own size stays.
    """
    sizes = [num_tokens]
    while sizes[-1] > least:
        sizes.append(max(sizes[-1] // 2, least))
    return [(), *((MICRO_BATCH.format(size),) for size in sizes[1:])]


def costs(flags: Flags) -> str:
    """Return what the settings cost, in words; "" for none."""
    found = (COSTS.get(flag) or COSTS.get(key_of(flag)) for flag in flags)
    return "; ".join(dict.fromkeys(filter(None, found)))


def _without(kept: Collection[str], all_flags: Iterable[Flags]) -> list[Flags]:
    """Return each of the flags once, without settings in `kept`."""
    free = (tuple(flag for flag in flags if key_of(flag) not in kept) for flags in all_flags)
    return list(dict.fromkeys(free))


def key_of(flag: str) -> str:
    """Return the key of a setting that is written `--a.b=c` or `a.b=c`."""
    return flag.removeprefix("--").partition("=")[0]


def _layouts(world_size: int) -> Iterator[Flags]:
    """Yield the layouts of a world: all ranks with all of the model, then cut along some axes."""
    engines: list[Flags] = [()]
    parts = [size for size in EXPERT_SIZES if world_size % size == 0]
    exact: list[Flags] = [(), *((f"--split.train.ep={size}",) for size in parts)]
    inexact: list[Flags] = []
    sizes = [size for size in MATRIX_SIZES if world_size % size == 0]
    sharing = [(f"--{SEQUENCES}={size}",) for size in sizes]
    matrices = {size: (f"--{MATRICES}={size}",) for size in sizes}
    both = {size: _with_sequences(size, sizes, world_size) for size in sizes}
    exact += sharing
    for size in sizes:
        engines.append(("--engine.kind=sglang", OTHER_BITS, f"--split.infer.tp={size}"))
        sequence = "--trainer.backend.sequence_parallel=true"
        inexact.append((*matrices[size], sequence, OTHER_BITS))
    cut = [*matrices.values(), *chain.from_iterable(both.values())]
    yield from _product_of(engines[:1], [*exact, *cut, *inexact])
    for size in parts:  # native engines share experts, and then the trainer too
        yield (f"--split.infer.ep={size}",)
        yield f"--split.infer.ep={size}", f"--split.train.ep={size}"
    for size in sizes:  # native engines share matrices
        trainers = [(), *sharing, matrices[size], *both[size]]
        yield from _product_of([(f"--split.infer.tp={size}",)], trainers)
    yield from _product_of(engines[1:], [*exact, *inexact])


def _with_sequences(tp: int, sizes: Sequence[int], world_size: int) -> list[Flags]:
    """Return the layouts of a trainer whose ranks share matrices, `tp` each, and sequences."""
    fitting = (cp for cp in sizes if world_size % (cp * tp) == 0)
    return [(f"--{SEQUENCES}={cp}", f"--{MATRICES}={tp}") for cp in fitting]


def _product_of(engines: Iterable[Flags], trainers: Sequence[Flags]) -> Iterator[Flags]:
    """Yield each engine's flags with each trainer's."""
    for engine, trainer in product(engines, trainers):
        yield tuple(dict.fromkeys((*engine, *trainer)))
