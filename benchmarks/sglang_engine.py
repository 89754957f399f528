"""SGLang as the engine of a rank on one GPU, at the shape of a 0.6B model.

python -m benchmarks.sglang_engine --python /tmp/sgl --smoke
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.record import compared, counted, finish, gpu, gpu_machine
from benchmarks.shapes import random_weights, write_config
from benchmarks.table import Row
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.kv_pages import cache_token_bytes
from spmd_rl.rollout.sglang.build import build
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.engine import SglangEngine
from spmd_rl.rollout.sglang.options import ask_site
from spmd_rl.types.samples import Sample
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import Executor
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.plan.moves import plan_moves
from spmd_rl.weights.proof.digest import digest
from spmd_rl.weights.tensor_ends import TensorSource

TOKENIZER_OF = Path("examples/arithmetic/model-20m")
LENGTHS = (5, 17, 64, 130)
GREEDY = SamplingConfig(temperature=0.0, max_tokens=32, ignore_eos=True)
Prompts = list[np.ndarray[Any, Any]]


class Pushes:
    """Pushes of whole tensors into an engine, by the runtime's executor."""

    def __init__(self, engine: SglangEngine, weights: Mapping[str, Tensor]) -> None:
        self.sink = engine.sink()
        self.weights = LocalTensors.whole(dict(weights))
        source = TensorSource(self.weights.items())
        moves = plan_moves([source.layout(0)], [self.sink.layout(0)], None, 0).moves
        device = next(iter(weights.values())).device
        self.executor = Executor(moves, LocalEnds(0, source, self.sink, device))

    def push(self, version: int, verify: bool = True) -> dict[str, float]:
        """Push once, and return the seconds of each part. "transport" ends when the child has
        copied the last portion.
        """
        began = time.perf_counter()
        self.sink.open()
        self.executor.run(None)
        assert self.sink._writer is not None
        self.sink._writer.drain()
        sent = time.perf_counter()
        if verify:
            held = {name: value for (name, _), value in self.sink.digest().items()}
            own = digest(self.weights)
            if differing := [name for name, value in own.items() if held.get(name) != value]:
                raise AssertionError(f"the child holds other bits of {differing[:3]}")
        digested = time.perf_counter()
        self.sink.commit(version)
        ended = time.perf_counter()
        return {
            "transport_s": sent - began,
            "verify_s": digested - sent,
            "commit_s": ended - digested,
        }


def prompts(count: int, vocab_size: int, seed: int = 1) -> Prompts:
    random = np.random.default_rng(seed)
    lengths = random.choice(LENGTHS, count)
    return [random.integers(0, vocab_size, length).astype(np.int32) for length in lengths]


def generate(engine: SglangEngine, of: Prompts, sampling: SamplingConfig) -> list[Sample]:
    for uid, prompt in enumerate(of):
        engine.submit(Request(uid, 0, prompt, sampling))
    done: list[Sample] = []
    while engine.has_work:
        done += engine.step().finished
    return sorted(done, key=lambda sample: sample.prompt_uid)


class Steps:
    """Prints a line for each step, with its time and what it returns, and goes on after errors."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.num_failed = 0

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            result = work()
        except Exception:  # noqa: BLE001 - all that fails is shown, and the next steps are tried
            self.num_failed += 1
            result = "FAILED\n" + traceback.format_exc()
        now = time.perf_counter()
        shown = "" if isinstance(result, (SglangEngine, list)) else result
        print(f"{now - self.began:7.1f}s {name}: {now - began:.3f} s {shown}", flush=True)
        return result


def smoke(cfg: SglangEngineConfig, device: torch.device) -> int:
    step = Steps()
    folder = Path(tempfile.mkdtemp()) / "model"
    spec = write_config("0.6B", folder, TOKENIZER_OF)
    engine = step("start", lambda: build(cfg, str(folder), device))
    if not isinstance(engine, SglangEngine):
        return 1
    print(f"         parts of the start {engine.start_seconds}", flush=True)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in random_weights(spec, seed=3)}
    inputs = prompts(16, spec.vocab_size)
    pushes = Pushes(engine, weights)
    step("first push", lambda: pushes.push(1))
    step("second push", lambda: pushes.push(2))
    first = step("generate 16 x 32", lambda: generate(engine, inputs, GREEDY))
    step("lengths", lambda: sorted({(len(one.tokens), one.status) for one in first})[:4].__str__())
    step("generate again", lambda: generate(engine, inputs, GREEDY))
    for _ in range(2):
        before = torch.cuda.mem_get_info(device)[0]
        step("sleep", engine.sleep)
        freed = (torch.cuda.mem_get_info(device)[0] - before) / 2**30
        step(f"wake ({freed:.1f} GiB were given back)", engine.wake)
    step("push after the wake", lambda: pushes.push(3))

    def same() -> str:
        again = generate(engine, inputs, GREEDY)
        pairs = zip(first, again, strict=True)
        return f"{sum(np.array_equal(a.tokens, b.tokens) for a, b in pairs)} of {len(first)} equal"

    step("greedy after sleep, wake, push", same)

    def interrupted() -> str:
        long = SamplingConfig(temperature=1.0, max_tokens=200, ignore_eos=True)
        for uid, prompt in enumerate(inputs):
            engine.submit(Request(uid, 0, prompt, long))
        engine.step()
        pushes.push(4)
        done: list[Sample] = []
        while engine.has_work:
            done += engine.step().finished
        versions = sorted({tuple(np.unique(one.versions).tolist()) for one in done})
        return f"{len(done)} samples, versions {versions}"

    step("push in the middle", interrupted)

    def aborted() -> str:
        for uid, prompt in enumerate(inputs):
            engine.submit(Request(uid, 0, prompt, GREEDY))
        parts = [sample for uid in range(8) for sample in engine.abort(uid)]
        done: list[Sample] = []
        while engine.has_work:
            done += engine.step().finished
        return f"{len(parts)} aborted, {len(done)} finished"

    step("abort half", aborted)

    def killed() -> str:
        engine.submit(Request(0, 0, inputs[0], GREEDY))
        os.kill(engine.child.pid, signal.SIGKILL)
        try:
            while engine.has_work:
                engine.step()
        except Exception as error:  # noqa: BLE001 - it is the result
            return f"{type(error).__name__}: {error}"
        return "nothing was noticed"

    step("killed child", killed)
    step("close", engine.close)
    return int(step.num_failed > 0)


class UpdateWeightsFromTensorReqInput(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """SGLang's own way to update weights: pickled handles of CUDA IPC."""

    rid: str | None = None
    http_worker_ipc: str | None = None
    serialized_named_tensors: list[bytes]


class UpdateWeightsFromTensorReqOutput(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    rid: str | None = None
    http_worker_ipc: str | None = None
    success: bool
    message: str


def update_from_tensor(engine: SglangEngine, weights: Mapping[str, Tensor]) -> float:
    """Return the seconds of SGLang's own update, from the pickling to its answer."""
    client, began = engine.client, time.perf_counter()
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(list(weights.items()))
    client.send(UpdateWeightsFromTensorReqInput(serialized_named_tensors=[buffer.getvalue()]))
    if not client._answers.poll(60_000):
        raise TimeoutError("SGLang did not answer update_weights_from_tensor")
    answer = msgspec.msgpack.decode(client._answers.recv(), type=UpdateWeightsFromTensorReqOutput)
    seconds = time.perf_counter() - began
    if not answer.success:
        raise RuntimeError(answer.message)
    torch.cuda.ipc_collect()
    return seconds


def copied_twice(weights: Mapping[str, Tensor]) -> float:
    """Return the seconds of copying all tensors to other memory and on to a third."""
    sources = list(weights.values())
    first, second = ([torch.empty_like(one) for one in sources] for _ in range(2))
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch._foreach_copy_(first, sources)
    torch._foreach_copy_(second, first)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def push_rows(engine: SglangEngine, weights: Mapping[str, Tensor], repeats: int = 9) -> list[Row]:
    pushes = Pushes(engine, weights)
    transports, ours, theirs, floors, verified = [], [], [], [], []
    for turn in range(repeats + 1):
        parts = pushes.push(turn, verify=False)
        floor = copied_twice(weights)
        own = update_from_tensor(engine, weights)
        whole = pushes.push(turn)
        if turn:  # the first makes the slab, and opens handles
            transports.append(parts["transport_s"])
            ours.append(sum(parts.values()))
            floors.append(floor)
            theirs.append(own)
            verified.append(sum(whole.values()))
    transport_ms, push_ms, peer_ms, floor_ms, verified_ms = (
        1e3 * statistics.median(values) for values in (transports, ours, theirs, floors, verified)
    )
    return [
        Row(
            what="push to SGLang with its load and flush, whole",
            value=push_ms,
            unit="ms",
            peer="update_weights_from_tensor",
            peer_value=peer_ms,
            ratio=push_ms / peer_ms,
            bar="at most 0.5x",
            holds=push_ms <= 0.5 * peer_ms,
        ),
        compared(
            "transport of a push, until SGLang's parameters hold it",
            transport_ms,
            "ms",
            peer="the same bytes copied twice within one process",
            peer_value=floor_ms,
            at_most=1.3,
        ),
        Row(what="push with the digests of both ends", value=verified_ms, unit="ms"),
    ]


def logprob_rows(
    folder: Path, weights: Mapping[str, Tensor], samples: list[Sample], of: Prompts
) -> list[Row]:
    """Compare greedy samples with transformers in bf16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda"):
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.load_state_dict(dict(weights), strict=False)
    model.tie_weights()
    num_equal = num_tokens = 0
    distances = []
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens.astype(np.int64)).cuda()
        prompt = torch.from_numpy(of[sample.prompt_uid].astype(np.int64)).cuda()
        with torch.no_grad():
            logits = model(torch.cat([prompt, tokens])[None]).logits[0]
        scores = logits[len(prompt) - 1 : -1].float()
        num_equal += int((scores.argmax(-1) == tokens).sum())
        num_tokens += len(tokens)
        own = scores.log_softmax(-1).gather(1, tokens[:, None])[:, 0].cpu()
        distances.append((own - torch.from_numpy(sample.logprobs)).abs())
    distance = torch.cat(distances)
    mean = float(distance.mean())
    return [
        Row(
            what="greedy tokens that are transformers' argmax",
            value=num_equal,
            unit="tokens",
            peer="all tokens",
            peer_value=num_tokens,
            ratio=num_equal / num_tokens,
            bar="at least 0.98x",
            holds=num_equal >= 0.98 * num_tokens,
        ),
        Row(
            what="mean of abs(dlogp) to transformers",
            value=mean,
            unit="nats",
            bar="at most 0.01",
            holds=mean <= 0.01,
        ),
        Row(what="largest abs(dlogp) to transformers", value=float(distance.max()), unit="nats"),
    ]


def one_by_one(engine: SglangEngine, of: Prompts) -> list[Sample]:
    """Generate greedily from a prompt at a time, so that every batch has one sequence.

    SGLang's bits depend on the batch, and so do greedy tokens where two are about as likely.
    """
    return [sample for prompt in of for sample in generate(engine, [prompt], GREEDY)]


def cycle_rows(
    engine: SglangEngine, weights: Mapping[str, Tensor], of: Prompts, cycles: int
) -> list[Row]:
    """Sleep, wake, push and generate, over and over."""
    device = torch.device("cuda", 0)
    spec = engine.spec
    kv_token = cache_token_bytes(spec, 2)
    owned = sum(tensor.nbytes for tensor in weights.values()) + engine.max_kv_tokens * kv_token
    pushes = Pushes(engine, weights)
    pushes.push(0)  # SGLang forgets the keys of these prompts that a larger batch computed
    first = one_by_one(engine, of)
    freed, free_after, resident, equal = [], [], [], []
    for cycle in range(cycles):
        before = torch.cuda.mem_get_info(device)[0]
        engine.sleep()
        freed.append(torch.cuda.mem_get_info(device)[0] - before)
        engine.wake()
        pushes.push(cycle, verify=False)
        if cycle % 10 == 0 or cycle == cycles - 1:
            again = one_by_one(engine, of)
            equal += [np.array_equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True)]
        free_after.append(torch.cuda.mem_get_info(device)[0])
        resident.append(int(Path(f"/proc/{engine.child.pid}/statm").read_text().split()[1]))
    share = min(freed) / owned
    skip = min(10, cycles - 1)  # of cycles after which nothing may grow
    growth = free_after[skip] - free_after[-1]
    return [
        Row(
            what="least memory given back by a sleep",
            value=min(freed) / 2**30,
            unit="GiB",
            peer="weights, keys and values",
            peer_value=owned / 2**30,
            ratio=share,
            bar="at least 0.99x",
            holds=share >= 0.99,
        ),
        Row(
            what=f"GPU memory that {cycles} cycles lost",
            value=growth / 2**20,
            unit="MiB",
            bar="at most 2",
            holds=growth <= 2 << 20,
        ),
        Row(
            what=f"resident memory that the child gained in {cycles} cycles",
            value=(resident[-1] - resident[skip]) * 4096 / 2**20,
            unit="MiB",
        ),
        counted("greedy samples that are equal after sleep, wake and push", equal),
    ]


def abort_rows(engine: SglangEngine, vocab_size: int) -> list[Row]:
    """Abort 100 of 200 running requests, and compare the others with a run without aborts."""
    of = prompts(200, vocab_size, seed=7)
    long = SamplingConfig(temperature=0.0, max_tokens=64, ignore_eos=True)
    alone = generate(engine, of, long)
    for uid, prompt in enumerate(of):
        engine.submit(Request(uid, 0, prompt, long))
    for _ in range(3):
        engine.step()
    for uid in range(0, 200, 2):
        engine.abort(uid)
    done: list[Sample] = []
    while engine.has_work:
        done += engine.step().finished
    is_whole = [len(sample.tokens) == 64 for sample in done]
    equal = [
        np.array_equal(sample.tokens, alone[sample.prompt_uid].tokens)
        for sample in done
        if sample.prompt_uid % 2
    ]
    return [
        counted("requests beside 100 aborted ones that finished whole", is_whole),
        counted("of these, with the greedy tokens of a run without aborts", equal, all_must=False),
    ]


def measure(cfg: SglangEngineConfig, name: str, starts: int, cycles: int, save: bool) -> int:
    device = torch.device("cuda", 0)
    folder = Path(tempfile.mkdtemp()) / "model"
    spec = write_config(name, folder, TOKENIZER_OF)
    weights = {key: tensor.to(torch.bfloat16) for key, tensor in random_weights(spec, seed=3)}
    rows: list[Row] = []
    for start in (named := ("first", "second")[:starts]):
        began = time.perf_counter()
        engine = build(cfg, str(folder), device)
        pushes = Pushes(engine, weights)
        pushes.push(0)
        of = prompts(64, spec.vocab_size)
        generate(engine, of[:1], SamplingConfig(temperature=0.0, max_tokens=1))
        seconds = time.perf_counter() - began
        is_warm = start == "second"
        rows.append(
            Row(
                what=f"{start} start on this machine, to the first token",
                value=seconds,
                unit="s",
                bar="at most 45" if is_warm else None,
                holds=seconds <= 45 if is_warm else None,
            )
        )
        rows += [
            Row(what=f"{start} start: {part}", value=value, unit="s")
            for part, value in engine.start_seconds.items()
        ]
        if start != named[-1]:
            engine.close()
    rows += push_rows(engine, weights)
    pushes.push(1)
    rows += logprob_rows(folder, weights, generate(engine, of, GREEDY), of)
    rows += cycle_rows(engine, weights, of[:16], cycles)
    rows += abort_rows(engine, spec.vocab_size)
    engine.close()
    packages = ("torch",)
    version = ask_site(cfg.python).version
    return finish(
        __file__, packages, rows, save=save, machine=gpu_machine(), sglang=version, **gpu()
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default="", help="as engine.python")
    parser.add_argument("--attention", default="triton", help="SGLang's attention_backend")
    parser.add_argument("--model", default="0.6B", help="a shape of benchmarks/shapes.py")
    parser.add_argument("--starts", type=int, choices=(1, 2), default=2)
    parser.add_argument("--cycles", type=int, default=100, help="of sleep, wake and push")
    parser.add_argument("--save", action="store_true", help="write the result")
    parser.add_argument("--smoke", action="store_true", help="try each part once, and say the time")
    words = parser.parse_args()
    options = {"attention_backend": words.attention, "cuda_graph_max_bs_decode": 64}
    max_batch = 64 if words.smoke else 256
    cfg = SglangEngineConfig(python=words.python, options=options, max_batch=max_batch)
    if words.smoke:
        return smoke(cfg, torch.device("cuda", 0))
    return measure(cfg, words.model, words.starts, words.cycles, words.save)


if __name__ == "__main__":
    sys.exit(main())
