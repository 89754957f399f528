"""A fake SGLang 0.5.16 or 0.5.17: its structs, its sockets, and tokens that it draws by hashing.

`write_site` makes a folder of packages, which `engine.python` may name, and in which this file is
`sglang.srt.server_args`. The child's own program then runs as it does with the real SGLang. A token
depends on the weights and on (uid, index, position) alone, so a resumed answer can be compared with
an unbroken one. It needs msgspec and pyzmq; torch is imported for the first push.

With `tp_size`, the first scheduler passes calls and what concerns memory on to the others, and each
has the part of the weights that SGLang would give it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from array import array
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import zmq

VERSION = "0.5.16"
IS_LATER = getattr(sys.modules.get("sglang"), "__version__", VERSION) == "0.5.17"
FORCED_INTERVAL = 50  # tokens between messages of a request that is not streamed


@dataclasses.dataclass
class ServerArgs:
    """The options that the tests set; `fake_steps` may run before more are granted."""

    model_path: str
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    dtype: str = "auto"
    random_seed: int | None = None
    max_running_requests: int = 256
    enable_memory_saver: bool = False
    log_level: str = "info"
    sleep_on_idle: bool = False
    cuda_graph_config: dict[str, Any] | None = None
    attention_backend: str | None = None
    quantization: str | None = None
    disable_radix_cache: bool = False
    moe_runner_backend: str = "auto"
    enable_return_routed_experts: bool = False
    tp_size: int = 1
    ep_size: int = 1
    fake_steps: int = -1  # -1: as many as there is work for
    fake_retracts: bool = False  # say of each request that it was retracted
    fake_failure: str = ""  # what the scheduler raises while it is built
    # these concern the last scheduler of a group
    fake_wrong_byte: bool = False  # flip a bit of the first parameter after each push
    fake_death_in_push: bool = False  # the child is killed when it is told to receive weights


def set_global_server_args_for_scheduler(server_args: ServerArgs) -> None:
    assert server_args.model_path


@dataclasses.dataclass
class PortArgs:
    tokenizer_ipc_name: str
    scheduler_input_ipc_name: str
    detokenizer_ipc_name: str
    nccl_port: int
    rpc_ipc_name: str
    metrics_ipc_name: str
    tokenizer_worker_ipc_name: str | None
    decoupled_spec_ipc_config: Any
    load_collector_ipc_name: str = ""
    instance_id: str = ""


class BaseReq(msgspec.Struct, tag=True, kw_only=True, array_like=True):
    rid: str | None = None
    http_worker_ipc: str | None = None


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=not IS_LATER, array_like=IS_LATER):
    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: set[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 1 << 30
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None
    stop_strs: str | list[str] | None = None
    stop_regex_strs: str | list[str] | None = None
    stop_str_max_len: int = 0
    stop_regex_max_len: int = 0
    is_normalized: bool = False


class TokenizedGenerateReqInput(BaseReq, kw_only=True):
    input_text: str | None
    input_ids: array | None
    input_embeds: Any
    mm_inputs: Any
    token_type_ids: Any
    sampling_params: SamplingParams
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: Any
    stream: bool
    # as in 0.5.17
    return_sampling_mask: bool = False
    return_flat_raw_top_logprobs: bool = False
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0


class BatchTokenIDOutput(msgspec.Struct, tag=True, kw_only=True, array_like=True):
    rids: list[str] | None = None
    http_worker_ipcs: Any = None
    finished_reasons: list[dict[str, Any] | None]
    decoded_texts: list[str]
    decode_ids: list[array]
    read_offsets: list[int]
    output_ids: list[array]
    skip_special_tokens: list[bool]
    spaces_between_special_tokens: list[bool]
    no_stop_trim: list[bool]
    prompt_tokens: list[int]
    reasoning_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    input_token_logprobs_val: Any
    input_token_logprobs_idx: Any
    output_token_logprobs_val: list[list[float]]
    output_token_logprobs_idx: Any
    input_top_logprobs_val: Any = None
    input_top_logprobs_idx: Any = None
    output_top_logprobs_val: Any = None
    output_top_logprobs_idx: Any = None
    input_token_ids_logprobs_val: Any = None
    input_token_ids_logprobs_idx: Any = None
    output_token_ids_logprobs_val: Any = None
    output_token_ids_logprobs_idx: Any = None
    output_token_entropy_val: Any = None
    output_token_sampling_mask: Any = None
    output_token_sampling_logprobs: Any = None
    output_hidden_states: Any = None
    routed_experts: list[Any] | None = None  # of each request: shape, dtype and bytes of a tensor
    indexer_topk: Any = None
    placeholder_tokens_idx: Any = None
    placeholder_tokens_val: Any = None
    retraction_counts: list[int] | None = None


class AbortReq(BaseReq, kw_only=True):
    abort_all: bool = False
    finished_reason: dict[str, Any] | None = None
    abort_message: str | None = None


class FlushCacheReqInput(BaseReq, kw_only=True):
    timeout_s: float | None = None


class FlushCacheReqOutput(BaseReq, kw_only=True):
    success: bool
    message: str = ""


class ReleaseMemoryOccupationReqInput(BaseReq, kw_only=True):
    tags: list[str] | None = None


class ReleaseMemoryOccupationReqOutput(BaseReq, kw_only=True):
    pass


class ResumeMemoryOccupationReqInput(BaseReq, kw_only=True):
    tags: list[str] | None = None


class ResumeMemoryOccupationReqOutput(BaseReq, kw_only=True):
    pass


class RpcReqInput(BaseReq, kw_only=True):
    method: str
    parameters: dict[str, bool | int | float | str | None] | None = None


class RpcReqOutput(BaseReq, kw_only=True):
    success: bool
    message: str


Received = (
    TokenizedGenerateReqInput
    | AbortReq
    | FlushCacheReqInput
    | ReleaseMemoryOccupationReqInput
    | ResumeMemoryOccupationReqInput
)


def _encode_array(value: Any) -> Any:
    if isinstance(value, array):
        return value.typecode, value.tobytes()
    raise TypeError(type(value))


def _decode_array(_: Any, value: Any) -> array:
    typecode, data = value
    made = array(typecode)
    made.frombytes(data)
    return made


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder = msgspec.msgpack.Decoder(Received, dec_hook=_decode_array)
_rpc_decoder = msgspec.msgpack.Decoder(RpcReqInput)


def draw(weights: int, uid: int, index: int, position: int, vocab_size: int) -> tuple[int, float]:
    """The token at a position, and its log-prob."""
    mixed = weights & 0xFFFFFFFF
    for word in (uid, index, position):
        mixed = (mixed * 6364136223846793005 + word * 1442695040888963407 + 97) % (1 << 64)
        mixed ^= mixed >> 29
    return int(mixed >> 7) % vocab_size, -float(mixed % 977) / 128


def route(weights: int, uid: int, row: int, layer: int, sizes: tuple[int, int]) -> list[int]:
    """The experts that a row of a prompt goes to in a layer, in an order of their own."""
    num_experts, num_chosen = sizes
    first = draw(weights, uid, layer, row, num_experts)[0]
    return [(first + 2 * one) % num_experts for one in range(num_chosen)]


class Running:
    """One request of the fake."""

    def __init__(self, message: TokenizedGenerateReqInput) -> None:
        assert message.rid is not None
        assert message.input_ids is not None
        assert message.sampling_params.is_normalized
        self.rid = message.rid
        self.uid, self.index = (int(part, 16) for part in message.rid.split(".")[:2])
        self.params = message.sampling_params
        self.stream = message.stream
        self.routes_from = (
            message.routed_experts_start_len if message.return_routed_experts else None
        )
        self.weights: list[int] = []  # that each row was computed with
        self.num_prompt = len(message.input_ids)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.num_sent = 0
        self.is_aborted = False
        self.reason: dict[str, Any] | None = None

    def grow(self, weights: int, vocab_size: int, eos_ids: set[int]) -> None:
        position = self.num_prompt + len(self.tokens)
        token, logprob = draw(weights, self.uid, self.index, position, vocab_size)
        self.weights += [weights] * (position - len(self.weights))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        ends = set() if self.params.ignore_eos else eos_ids | (self.params.stop_token_ids or set())
        if self.is_aborted:
            self.reason = {"type": "abort", "message": "Aborted"}
        elif len(self.tokens) >= (self.params.max_new_tokens or 0):
            self.reason = {"type": "length", "length": len(self.tokens)}
        elif token in ends:
            self.reason = {"type": "stop", "matched": token}

    @property
    def is_due(self) -> bool:
        interval = (self.params.stream_interval or 1) if self.stream else FORCED_INTERVAL
        return self.reason is not None or len(self.tokens) % interval == 0


class Scheduler:
    """SGLang's scheduler, as far as the child and its rank use it."""

    def __init__(
        self,
        server_args: ServerArgs,
        port_args: PortArgs,
        gpu_id: int,
        tp_rank: int,
        *ranks: int | None,
    ) -> None:
        if server_args.fake_failure:
            raise ValueError(server_args.fake_failure)
        assert server_args.skip_tokenizer_init
        assert ranks == (0, 0, 0, 0, None)
        self.server_args = server_args
        self.tp_rank, self.tp_size = tp_rank, server_args.tp_size
        if self.tp_size > 1:
            _join_group(tp_rank, self.tp_size)
        config = json.loads((Path(server_args.model_path) / "config.json").read_text())
        self.vocab_size: int = config["vocab_size"]
        self.num_layers: int = config["num_hidden_layers"]
        self.expert_sizes = config.get("num_experts", 0), config.get("num_experts_per_tok", 0)
        eos = config.get("eos_token_id")
        self.eos_ids = {eos} if isinstance(eos, int) else set(eos or ())
        context = zmq.Context()
        self._requests = context.socket(zmq.PULL)
        self._requests.connect(port_args.scheduler_input_ipc_name)
        self._answers = context.socket(zmq.PUSH)
        self._answers.connect(port_args.tokenizer_ipc_name)
        self._calls = context.socket(zmq.DEALER)
        self._calls.connect(port_args.rpc_ipc_name)
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._pending_flush: float | None = None
        self._asleep: set[str] = set()
        self._steps_left = server_args.fake_steps
        self._weights: int | None = None
        self._model: Any = None

    @property
    def tp_worker(self) -> Any:
        return self

    @property
    def model_runner(self) -> Any:
        return self

    @property
    def model(self) -> Any:
        if self._model is None:
            is_quantized = self.server_args.quantization is not None
            args = self.server_args
            part = self.tp_rank, self.tp_size, args.ep_size
            backend = args.moe_runner_backend
            self._model = _model(args.model_path, args.dtype, is_quantized, backend, *part)
        return self._model

    def get_init_info(self) -> dict[str, Any]:
        return {"status": "ready", "max_total_num_tokens": 1 << 16, "max_req_input_len": 1 << 16}

    def run_event_loop(self) -> None:
        while self.tp_rank:
            self._follow()
        poller = zmq.Poller()
        poller.register(self._requests, zmq.POLLIN)
        poller.register(self._calls, zmq.POLLIN)
        while True:
            can_step = (self._running or self._waiting) and self._steps_left != 0
            ready = dict(poller.poll(0 if can_step else None))
            while self._requests in ready and self._requests.poll(0):
                self._handle(_decoder.decode(self._requests.recv()))
            if self._calls in ready:
                self._answer_call(_rpc_decoder.decode(self._calls.recv()))
            self._flush_if_idle()
            if (self._running or self._waiting) and self._steps_left != 0:
                self._step()
                self._flush_if_idle()

    def flush_cache(self, empty_cache: bool = True) -> bool:
        self._weights = None
        return not (self._running or self._waiting)

    def _follow(self) -> None:
        """Do what the first scheduler passes on."""
        message = _passed_on(None)
        if isinstance(message, RpcReqInput):
            self._call(message)
        else:
            self._handle(message)

    def fake_grant(self, steps: int) -> None:
        """Let so many more steps run, and no others; with -1, all that there is work for.

        A request that was aborted decodes once more even so.
        """
        is_ending = any(request.is_aborted for request in self._running)
        self._steps_left = steps or int(is_ending)

    def fake_exit(self, code: int) -> None:
        import os

        os._exit(code)

    def _handle(self, message: Received) -> None:
        is_memory = isinstance(
            message, ReleaseMemoryOccupationReqInput | ResumeMemoryOccupationReqInput
        )
        if is_memory and self.tp_size > 1 and not self.tp_rank:
            _passed_on(message)
        match message:
            case TokenizedGenerateReqInput():
                assert not self._asleep, "a request came while memory was released"
                self._waiting.append(Running(message))
            case AbortReq():
                self._abort(message)
            case FlushCacheReqInput():
                assert self._pending_flush is None
                self._pending_flush = time.monotonic() + (message.timeout_s or 0)
            case ReleaseMemoryOccupationReqInput():
                assert not self._running, "release_memory_occupation when not idle"
                assert not self._waiting, "release_memory_occupation when not idle"
                for tag in message.tags or ():
                    assert tag not in self._asleep
                    self._asleep.add(tag)
                self._send(ReleaseMemoryOccupationReqOutput())
            case ResumeMemoryOccupationReqInput():
                for tag in message.tags or ():
                    self._asleep.remove(tag)
                if self._model is not None and "weights" in (message.tags or ()):
                    self._model.forget()
                    self._weights = None
                self._send(ResumeMemoryOccupationReqOutput())

    def _answer_call(self, message: RpcReqInput) -> None:
        if self.tp_size > 1:
            _passed_on(message)
        success, text = self._call(message)
        self._calls.send(_encoder.encode(RpcReqOutput(success=success, message=text)))

    def _call(self, message: RpcReqInput) -> tuple[bool, str]:
        success, text = True, ""
        is_push = message.method == "spmd_receive_weights" and self.tp_rank == self.tp_size - 1
        if self.server_args.fake_death_in_push and is_push:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            getattr(self, message.method)(**(message.parameters or {}))
        except Exception as error:
            success, text = False, str(error)
        if self.server_args.fake_wrong_byte and is_push:
            self._model.flip()
        if self.tp_size > 1:
            import torch.distributed as dist

            dist.barrier()
        return success, text

    def _abort(self, message: AbortReq) -> None:
        kept: deque[Running] = deque()
        for request in self._waiting:
            if message.abort_all or request.rid.startswith(message.rid or ""):
                self._send(AbortReq(rid=request.rid))
            else:
                kept.append(request)
        self._waiting = kept
        for request in self._running:
            if message.abort_all or request.rid.startswith(message.rid or ""):
                request.is_aborted = True
        if self._running and self._steps_left == 0:
            self._steps_left = 1  # one that was aborted decodes once more

    def _step(self) -> None:
        room = self.server_args.max_running_requests - len(self._running)
        for _ in range(min(room, len(self._waiting))):
            self._running.append(self._waiting.popleft())
        if self._steps_left > 0:
            self._steps_left -= 1
        if self._weights is None:
            self._weights = self._model.checksum() if self._model is not None else 0
        for request in self._running:
            request.grow(self._weights, self.vocab_size, self.eos_ids)
        self._send_tokens([request for request in self._running if request.is_due])
        self._running = [request for request in self._running if request.reason is None]

    def _flush_if_idle(self) -> None:
        if self._pending_flush is None:
            return
        is_idle = not (self._running or self._waiting)
        if is_idle or time.monotonic() >= self._pending_flush:
            self._pending_flush = None
            self._send(FlushCacheReqOutput(success=is_idle and self.flush_cache()))

    def _send_tokens(self, requests: list[Running]) -> None:
        if not requests:
            return
        count = len(requests)
        new = [request.tokens[request.num_sent :] for request in requests]
        scores = [request.logprobs[request.num_sent :] for request in requests]
        for request in requests:
            request.num_sent = len(request.tokens)
        self._send(
            BatchTokenIDOutput(
                rids=[request.rid for request in requests],
                finished_reasons=[request.reason for request in requests],
                decoded_texts=[""] * count,
                decode_ids=[array("q", tokens) for tokens in new],
                read_offsets=[0] * count,
                output_ids=[array("q", tokens) for tokens in new],
                skip_special_tokens=[True] * count,
                spaces_between_special_tokens=[True] * count,
                no_stop_trim=[False] * count,
                prompt_tokens=[request.num_prompt for request in requests],
                reasoning_tokens=[0] * count,
                completion_tokens=[len(request.tokens) for request in requests],
                cached_tokens=[0] * count,
                input_token_logprobs_val=[[] for _ in requests],
                input_token_logprobs_idx=[[] for _ in requests],
                output_token_logprobs_val=scores,
                output_token_logprobs_idx=new,
                routed_experts=[self._routes_of(request) for request in requests],
                retraction_counts=[int(self.server_args.fake_retracts)] * count,
            )
        )

    def _routes_of(self, request: Running) -> Any:
        """Return the routes of a request that has ended and asks for them, as SGLang does."""
        first = request.routes_from
        if first is None or request.reason is None:
            return None
        assert self.server_args.enable_return_routed_experts
        last = request.num_prompt + len(request.tokens) - 1
        ids = array("i")
        for row in range(first, last):
            for layer in range(self.num_layers):
                weights = request.weights[row]
                ids.extend(route(weights, request.uid, row, layer, self.expert_sizes))
        return (last - first, self.num_layers, self.expert_sizes[1]), "int32", ids.tobytes()

    def _send(self, message: msgspec.Struct) -> None:
        if not self.tp_rank:
            self._answers.send(_encoder.encode(message))


def configure_scheduler_process(
    server_args: ServerArgs, gpu_id: int, tp_rank: int, *ranks: int | None
) -> None:
    assert ranks == (0, 0, 0, 0, None)


def _join_group(rank: int, size: int) -> None:
    import torch.distributed as dist

    method = os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"]
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)


def _passed_on(message: Any) -> Any:
    """Return the message that the first scheduler gives."""
    import torch.distributed as dist

    holder = [message]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def _local_part(name: str, spec: Any, rank: int, size: int) -> tuple[int, int, int] | None:
    """Return the dim, start and length of a rank's part of a tensor; None where it has all."""
    attention, mlp = spec.blocks[0].layers
    width, kind = attention.head_dim, name.split(".")[-2]
    heads = attention.num_heads // size
    all_kv_heads = attention.num_kv_heads
    kv_heads, copies = max(all_kv_heads // size, 1), max(size // all_kv_heads, 1)
    columns = getattr(mlp, "intermediate_size", 0) // size
    rows = -(-spec.vocab_size // 64) * 64 // size
    if ".experts." in name:
        return None
    return {
        "q_proj": (0, rank * heads * width, heads * width),
        "k_proj": (0, rank // copies * kv_heads * width, kv_heads * width),
        "v_proj": (0, rank // copies * kv_heads * width, kv_heads * width),
        "o_proj": (1, rank * heads * width, heads * width),
        "gate_proj": (0, rank * columns, columns),
        "up_proj": (0, rank * columns, columns),
        "down_proj": (1, rank * columns, columns),
        "embed_tokens": (0, rank * rows, min(rows, spec.vocab_size - rank * rows)),
        "lm_head": (0, rank * rows, min(rows, spec.vocab_size - rank * rows)),
    }.get(kind)


def _model(
    folder: str,
    dtype: str,
    is_quantized: bool,
    backend: str,
    tp_rank: int,
    tp_size: int,
    ep_size: int = 1,
) -> Any:
    """A module with a rank's parameters of SGLang's models, fused and with padded rows.

    A rank's experts are in two parameters of each layer.
    """
    import zlib

    import torch
    from torch import nn

    from spmd_rl.model.read import read_spec

    spec = read_spec(folder)
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    fused |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    rows: dict[str, list[int]] = {}
    parts: dict[str, tuple[str, Any]] = {}  # of each tensor: parameter, and index in it
    local = {name: _local_part(name, spec, tp_rank, tp_size) for name in spec.parameter_shapes()}
    for name, shape in spec.parameter_shapes().items():
        if (part := local[name]) is not None:
            shape = (*shape[: part[0]], part[2], *shape[part[0] + 1 :])
        if ".experts." in name:
            path, _, rest = name.partition(".experts.")
            number, projection, _ = rest.split(".")
            stacked = {"gate_proj": ("w13", 0), "up_proj": ("w13", 1), "down_proj": ("w2", 0)}
            kind, half = stacked[projection]
            owner = f"{path}.experts.{kind}_weight"
            num_own = spec.num_experts // ep_size
            place = int(number) - tp_rank * ep_size // tp_size * num_own
            if not 0 <= place < num_own:
                continue
            rows[owner] = [num_own, (2 if kind == "w13" else 1) * shape[0], shape[1]]
            parts[name] = owner, (place, slice(half * shape[0], (half + 1) * shape[0]))
            continue
        owner = ".".join(fused.get(word, word) for word in name.split("."))
        size = rows.setdefault(owner, [0, *shape[1:]])
        parts[name] = owner, slice(size[0], size[0] + shape[0])
        size[0] += shape[0]
    for owner, size in rows.items():
        if owner.endswith(("embed_tokens.weight", "lm_head.weight")):
            size[0] = -(-spec.vocab_size // 64) * 64 // tp_size

    class UnquantizedFusedMoEMethod:
        use_triton_kernels = backend == "triton_kernel"

    class Model(nn.Module):
        quant_config = object() if is_quantized else None

        def __init__(self) -> None:
            super().__init__()
            for owner, size in rows.items():
                *path, last = owner.split(".")
                module: nn.Module = self
                for word in path:
                    if not hasattr(module, word):
                        module.add_module(word, nn.Module())
                    module = getattr(module, word)
                if path[-1] == "experts":
                    module.quant_method = UnquantizedFusedMoEMethod()
                value = torch.zeros(size, dtype=getattr(torch, dtype))
                module.register_parameter(last, nn.Parameter(value, requires_grad=False))

        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            parameters = dict(self.named_parameters())
            for name, tensor in weights:
                owner, place = parts[name]
                if (part := local[name]) is not None:
                    tensor = tensor.narrow(*part)
                parameters[owner].data[place].copy_(tensor)

        def checksum(self) -> int:
            """Of all but the rows that pad the embeddings."""
            parameters, value = dict(self.named_parameters()), 0
            for owner, place in parts.values():
                data = parameters[owner].data[place].reshape(-1)
                value = zlib.crc32(data.view(torch.uint8).numpy().tobytes(), value)
            return value

        def forget(self) -> None:
            for parameter in self.parameters():
                parameter.data.fill_(-1.0)

        def flip(self) -> None:
            next(self.parameters()).data.view(-1)[0] += 1

    return Model()


def write_site(folder: Path, version: str = VERSION) -> Path:
    """Write the packages of this fake SGLang, and return the folder for `engine.python`."""
    source = Path(__file__).read_text(encoding="utf-8")
    managers = folder / "sglang/srt/managers"
    managers.mkdir(parents=True)
    (folder / "sglang/__init__.py").write_text(f"__version__ = {version!r}\n")
    (folder / "sglang/srt/__init__.py").touch()
    (folder / "sglang/srt/server_args.py").write_text(source)
    (managers / "__init__.py").touch()
    for name in ("io_struct", "scheduler"):
        (managers / f"{name}.py").write_text("from sglang.srt.server_args import *\n")
    info = folder / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return folder
