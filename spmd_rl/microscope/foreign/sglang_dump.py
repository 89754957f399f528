"""Program that runs under SGLang's interpreter: it computes sequences and writes a dump.

    python sglang_dump.py INPUTS SERVER_ARGS DUMP

INPUTS is the file of `spmd-rl mismatch --write-inputs`, SERVER_ARGS the JSON of SGLang's options.
Each sequence is one prefill of prompt and response, without a cache. This file imports SGLang,
torch and safetensors, and none of our packages.
"""

from __future__ import annotations

import array
import importlib.metadata
import json
import os
import site
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT = "hidden-states-1"
EXIT_CODE = 3
WHOLE_WORLD = (0, 0, 0, 0, 0)  # ranks in SGLang's five kinds of parallelism: each of size 1


class OutputRecorder:
    """Copies of all outputs, row by row and in host memory, under their names in the dump.

    A copy is made in the hook, because SGLang adds and norms in place.
    """

    def __init__(self) -> None:
        self.parts: dict[str, list[Tensor]] = {}
        self.num_rows = 0  # of the sequences before the present one
        self.length = 0
        self.scored = torch.zeros(0, dtype=torch.int64)  # rows of the present sequence
        self.targets = torch.zeros(0, dtype=torch.int64)
        self.temperature = 1.0

    def begin_sequence(self, sequence: dict[str, Any]) -> None:
        """Note what is computed next, and keep its tokens, positions and scored rows."""
        tokens = torch.tensor(sequence["tokens"], dtype=torch.int64)
        self.num_rows, self.length = self.num_rows + self.length, len(tokens)
        self.scored = torch.arange(sequence["num_prompt_tokens"] - 1, len(tokens) - 1)
        self.targets = tokens[self.scored + 1]
        self.temperature = sequence["temperature"]
        self._append("tokens", tokens)
        self._append("positions", torch.arange(len(tokens)))
        self._append("scored", self.scored + self.num_rows)

    def keep(self, name: str, x: Tensor) -> None:
        rows = x.detach().reshape(x.shape[0], -1)
        self._append(name, rows.to("cpu", copy=True).contiguous())

    def _append(self, name: str, part: Tensor) -> None:
        self.parts.setdefault(name, []).append(part)

    def tensors(self) -> dict[str, Tensor]:
        return {name: torch.cat(parts) for name, parts in self.parts.items()}


def first(output: Any) -> Tensor:
    """Return the hidden states of an output, which may come with a bias or a residual."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def hook_model(model: Any, recorder: OutputRecorder) -> None:
    """Record every op of SGLang's decoder. Modules that a model lacks are left out.

    SGLang's norms take (hidden, residual), add them, and return (normed, residual): the first of
    these is the point. So are the plain outputs of attention's and the MLP's projections, which the
    next norm adds.
    """
    decoder = model.model
    on_output(decoder.embed_tokens, lambda output: recorder.keep("embed", first(output)))
    on_output(decoder.norm, lambda output: recorder.keep("final_norm", first(output)))
    for number, layer in enumerate(decoder.layers):
        hook_layer(layer, f"layers.{number}.", recorder)
    model.logits_processor.register_forward_pre_hook(
        lambda module, args, kwargs: keep_logits(module, recorder, *args, **kwargs),
        with_kwargs=True,
    )


def hook_layer(layer: Any, prefix: str, recorder: OutputRecorder) -> None:
    keep = Keeper(recorder, prefix)
    on_output(layer.input_layernorm, keep.output("input_norm"))
    on_output(layer.post_attention_layernorm, keep.output("post_norm"))
    hook_attention(layer.self_attn, keep)
    mlp = layer.mlp
    if hasattr(mlp, "gate_up_proj"):
        on_output(mlp.gate_up_proj, keep.columns(("gate_proj", "up_proj")))
    if hasattr(mlp, "down_proj"):
        mlp.down_proj.register_forward_pre_hook(lambda module, args: keep("act", args[0]))
        on_output(mlp.down_proj, keep.output("down_proj"))


def hook_attention(attention: Any, keep: Keeper) -> None:
    def keep_inputs(module: Any, args: Any, kwargs: Any) -> None:
        inputs = dict(zip("qkv", args, strict=False)) | kwargs
        for op in "qkv":
            if inputs.get(op) is not None:
                keep(op, inputs[op])

    if hasattr(attention, "qkv_proj"):
        widths = [attention.q_size, attention.kv_size, attention.kv_size]
        on_output(attention.qkv_proj, keep.columns(("q_proj", "k_proj", "v_proj"), widths))
    attention.attn.register_forward_pre_hook(keep_inputs, with_kwargs=True)
    on_output(attention.attn, keep.output("attention"))
    on_output(attention.o_proj, keep.output("o_proj"))


class Keeper:
    """Keeps outputs of one layer, under the names of its points."""

    def __init__(self, recorder: OutputRecorder, prefix: str) -> None:
        self.recorder, self.prefix = recorder, prefix

    def __call__(self, op: str, x: Tensor) -> None:
        self.recorder.keep(self.prefix + op, x)

    def output(self, op: str) -> Callable[[Any], None]:
        return lambda output: self(op, first(output))

    def columns(
        self, ops: tuple[str, ...], widths: list[int] | None = None
    ) -> Callable[[Any], None]:
        """Return a function that keeps the columns of a joint product; equal ones by default."""

        def keep(output: Any) -> None:
            joint = first(output)
            parts = joint.split(widths or joint.shape[-1] // len(ops), -1)
            for op, part in zip(ops, parts, strict=True):
                self(op, part)

        return keep


def on_output(module: Any, keep: Callable[[Any], None]) -> None:
    module.register_forward_hook(lambda module, args, output: keep(output))


def keep_logits(
    module: Any, recorder: OutputRecorder, input_ids: Any, hidden: Tensor, head: Any, batch: Any,
    *_: Any, **__: Any,
) -> None:  # fmt: skip
    """Compute the logits of the scored rows as SGLang does, and their log-probs as its sampler."""
    from sglang.srt.layers.logits_processor import LogitsMetadata

    if not isinstance(batch, LogitsMetadata):
        batch = LogitsMetadata.from_forward_batch(batch)
    rows = recorder.scored.to(hidden.device)
    logits = module._get_logits(hidden[rows], head, batch).float()
    recorder.keep("logits", logits)
    logprobs = torch.log(torch.softmax(logits / recorder.temperature, -1))
    recorder.keep("logprob", logprobs.gather(1, recorder.targets.to(hidden.device)[:, None]))


def start_runner(arguments: dict[str, Any], folder: Path) -> Any:
    """Return the model runner of an SGLang scheduler that never runs its loop.

    The files of its sockets, which SGLang leaves behind, lie in `folder`.
    """
    from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
    from sglang.srt.server_args import PortArgs, ServerArgs

    server_args = ServerArgs(**arguments)
    tempfile.tempdir = str(folder)
    ports = PortArgs.init_new(server_args)
    tempfile.tempdir = None
    configure_scheduler_process(server_args, 0, *WHOLE_WORLD, None)
    scheduler = Scheduler(server_args, ports, 0, *WHOLE_WORLD, None)
    return scheduler.tp_worker.model_runner


def compute(runner: Any, number: int, tokens: list[int]) -> None:
    """Run one prefill over all tokens, with an empty cache."""
    from sglang.benchmark.one_batch import extend
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    request = Req(
        rid=str(number),
        origin_input_text="",
        origin_input_ids=array.array("q", tokens),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
    )
    request.full_untruncated_fill_ids = request.origin_input_ids
    request.logprob_start_len = -1
    request.set_extend_range(0, len(tokens))
    extend([request], runner)


def compute_all(runner: Any, sequences: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the dump's tensors."""
    recorder = OutputRecorder()
    hook_model(runner.model, recorder)
    for number, sequence in enumerate(sequences):
        recorder.begin_sequence(sequence)
        compute(runner, number, sequence["tokens"])
    return recorder.tensors()


def metadata(model: str, arguments: dict[str, Any], runner: Any) -> dict[str, str]:
    """Return what the page says of this side."""
    versions = {name: _version(name) for name in ("sglang", "sglang-kernel", "flashinfer-python")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    deterministic = arguments.get("enable_deterministic_inference", False)
    backend = getattr(runner, "prefill_attention_backend_str", "unknown")
    return {
        "format": FORMAT,
        "program": f"sglang {versions['sglang']}",
        "model": model[-200:],
        "dtype": arguments["dtype"],
        "device": device,
        "torch": torch.__version__,
        "attention_backend": str(backend),
        "deterministic": "yes" if deterministic else "no",
        **{name: version for name, version in versions.items() if version},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main(inputs: str, server_args: str, dump: str) -> None:
    from safetensors.torch import save_file

    described, arguments = json.loads(Path(inputs).read_text()), json.loads(server_args)
    runner = start_runner(arguments, Path(dump).parent)
    tensors = compute_all(runner, described["sequences"])
    save_file(tensors, dump, metadata(described["model"], arguments, runner))


if __name__ == "__main__":
    # a folder that packages were installed into may name more folders in .pth files
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder:
            site.addsitedir(folder)
    code = 0
    try:
        main(*sys.argv[1:])
    except BaseException as error:  # noqa: BLE001 - whatever it is, the last line says it
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = EXIT_CODE
    os._exit(code)  # SGLang's threads and sockets need no farewell
