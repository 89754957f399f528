"""Run under torchrun by test_shared_models.py: `shared_model_ranks.py WHAT OUT.json`.

WHAT is exchanges or engines. All ranks share a model. The report has what differs, for each rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.kernels import add_rms_norm, sample_and_score
from spmd_rl.kernels.linear.shard_exchange import ShardExchange, TorchExchange
from spmd_rl.kernels.linear.symm_exchange import SymmExchange
from spmd_rl.kernels.runtime.cuda_graph import Outputs, record
from spmd_rl.kernels.vocab.logprob import shard_size
from spmd_rl.kernels.vocab.vocab_parallel import vocab_parallel_sample
from spmd_rl.kernels.vocab.vocab_part import VocabPart
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.model.hf import random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.parts.part import ModelPart
from tests.dist.trainers import own_group
from tests.gpu.rollout.graph_case import DEVICE, SPEC, USUAL, new_engine, unequal, workload
from tests.samples import Samples, finish
from tests.shared_ranks import part_of_model

BF16 = torch.bfloat16
ROWS = (1, 7, 64, 2048)  # the last ones take several turns of the buffers
COLUMNS, VOCAB = 4096, 37984
REPLAYS = 300
# 16 divides the second one but not its parts, and a part of the third one alone
VOCABULARIES, DRAWS = (151936, 32016, 50268), 20


def drawn(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, columns, device="cuda", generator=generator)


def unequal_calls(symm: ShardExchange, reference: ShardExchange, rank: int) -> list[str]:
    """The calls that give other bits than the reference."""
    found = []
    for rows in ROWS:
        part, logits = drawn(rows, COLUMNS, rank), drawn(rows, VOCAB, rank)
        bias = drawn(1, COLUMNS, 99)[0].to(BF16)
        for way in ((None, torch.float32), (None, BF16), (bias, BF16)):
            wanted = reference.sum(part.clone(), *way)
            case = f"{rows} rows, {way[1]}, {way[0] is not None}"
            if not torch.equal(symm.sum(part.clone(), *way), wanted):
                found.append(f"sum of {case}")
            beside = drawn(rows, COLUMNS, 98).to(way[1]), drawn(1, COLUMNS, 97)[0].to(way[1]), 1e-6
            normed = add_rms_norm(symm.sum_later(part.clone(), *way), *beside)
            if not all(map(torch.equal, normed, add_rms_norm(wanted, *beside))):
                found.append(f"norm of {case}")
        if not torch.equal(symm.gather_columns(logits), reference.gather_columns(logits)):
            found.append(f"columns of {rows} rows")
    number = torch.tensor([[rank + (1 << 40)]], device="cuda")
    if not torch.equal(symm.gather_columns(number), reference.gather_columns(number)):
        found.append("a number")
    return found


def step(exchange: ShardExchange, part: Tensor, layers: int) -> Tensor:
    """Layers, and then the columns of all ranks: an odd number of calls."""
    residual, weight = part, torch.ones(COLUMNS, device="cuda")
    for _ in range(layers):
        later = exchange.sum_later(part * 0.5, None, torch.float32)
        part, residual = add_rms_norm(later, residual, weight, 1e-6)
    return exchange.gather_columns(residual)


def unequal_replays(symm: ShardExchange, reference: ShardExchange, rank: int) -> int:
    """Replays of two graphs, in turn with single calls, whose bits are not the reference's."""
    part, memory = drawn(16, COLUMNS, rank), torch.cuda.graph_pool_handle()
    graphs = [record(partial(step, symm, part, layers), memory) for layers in (4, 1)]
    differ = 0
    for number in range(REPLAYS):
        part.copy_(drawn(16, COLUMNS, rank + 10 * number))
        for (graph, out), layers in zip(graphs, (4, 1), strict=True):
            graph.replay()
            differ += not torch.equal(out, step(reference, part, layers))
        symm.sum(part.clone(), None, torch.float32)
    return differ


def replayed(work: Callable[[], Outputs]) -> Callable[[], Outputs]:
    """Return a call that replays the work."""
    graph, out = record(work, torch.cuda.graph_pool_handle())

    def replay() -> Outputs:
        graph.replay()
        return out

    return replay


def unequal_draws(exchange: ShardExchange, rank: int, tp: int) -> list[str]:
    """Draws by parts of the vocabulary, called and replayed, that are not those of whole rows."""
    found = []
    for size, rows in product(VOCABULARIES, ROWS[:3]):
        whole, scale = drawn(rows, size, 1), drawn(rows, 1, 2)[:, 0].abs() + 0.3
        bases = torch.arange(rows, device="cuda") * 12345
        asked, greedy = (scale, bases, bases % 501), torch.arange(rows, device="cuda") % 3 == 1
        width, part = shard_size(size) * 8 // tp, VocabPart(rank % tp, tp, size, exchange)
        mine = slice(part.first, part.first + width)
        own = whole[:, mine].contiguous()
        work = partial(vocab_parallel_sample, own, *asked, part, greedy=greedy)
        ways = {"called": work} | ({"replayed": replayed(work)} if exchange.is_recordable else {})
        for seed in range(1, DRAWS):
            whole = drawn(rows, size, seed)
            own.copy_(whole[:, mine])
            wanted = sample_and_score(whole, *asked, greedy=greedy)
            for way, draw in ways.items():
                if not all(map(torch.equal, draw(), wanted)):
                    found.append(f"{rows} rows of {size}, {way}, seed {seed}")
    return found


def of_exchanges(world: World, group: dist.ProcessGroup) -> dict[str, Any]:
    symm, reference = SymmExchange(group), TorchExchange(group)
    parts = reference.gather_columns(drawn(64, COLUMNS, world.rank)).chunk(world.size, 1)
    whole = reference.sum(drawn(64, COLUMNS, world.rank), None, torch.float32)
    in_order = sum(parts[1:], parts[0])
    return {
        "calls": unequal_calls(symm, reference, world.rank),
        "symm, draws": unequal_draws(symm, world.rank, world.size),
        "torch, draws": unequal_draws(reference, world.rank, world.size),
        "replays": unequal_replays(symm, reference, world.rank),
        "control": float((in_order != whole).float().mean()),
    }


def samples_of(model: CausalLM, cfg: Any) -> tuple[Samples, int]:
    engine = new_engine(model.to(DEVICE, BF16), cfg)
    return finish(engine, workload()), engine.stats()["num_graphs"]


def of_engines(world: World, group: dist.ProcessGroup) -> dict[str, Any]:
    """All ranks of an engine have the same requests, so they take the same steps."""
    spec = replace(SPEC, row_shards=world.size)
    weights, whole = dict(random_weights(spec, 0)), CausalLM(spec)
    whole.load_state_dict(weights)
    alone, _ = samples_of(whole.requires_grad_(False), USUAL)
    other = CausalLM(replace(SPEC, row_shards=1))
    other.load_state_dict(weights)
    control, _ = samples_of(other.requires_grad_(False), USUAL)
    report: dict[str, Any] = {"control": unequal(control, alone)}
    exchanges: dict[str, Callable[[dist.ProcessGroup], ShardExchange]] = {
        "symm": SymmExchange,
        "torch": TorchExchange,
    }
    for name, exchange in exchanges.items():
        part = ModelPart(world.rank, world.size, exchange(group))
        for cfg in (USUAL, replace(USUAL, max_batch=5, max_step_tokens=33)):
            model = part_of_model(spec, weights, part)
            found, num_graphs = samples_of(model, cfg)
            case = f"{name}, {cfg.max_batch} at once"
            report[case] = unequal(found, alone)
            report[f"{case}, graphs"] = num_graphs
    return report


def main(what: str, out: Path) -> None:
    world = World.from_env()
    join(world, open_store(world))
    group, every = own_group(world.size, world), [None] * world.size
    with torch.no_grad():
        own = (of_exchanges if what == "exchanges" else of_engines)(world, group)
    dist.all_gather_object(every, own)
    if world.rank == 0:
        out.write_text(json.dumps(every))
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
