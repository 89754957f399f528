"""Structs that cross between a rank and SGLang's scheduler, as SGLang 0.5.16 and 0.5.17 write them.

SGLang encodes a struct in msgpack as an array: the name of its class, then its fields in order. A
mirror may end before the real struct does. The reader then takes defaults for the rest, or ignores
it. The child compares the mirrors' fields with SGLang's before it reports that it is ready.
Opaque fields, which SGLang pickles, are sent as nil and are never decoded here.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import SpmdError

ALL_TOKENS = 1 << 30  # what SGLang calls no limit of top_k
_PICKLED = 0x80  # the first byte of a pickle of any protocol that binary data uses
_ARRAY_BYTES = (*range(0x90, 0xA0), 0xDC, 0xDD)  # with which msgpack begins an array


class _Request(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    rid: str | None = None
    http_worker_ipc: str | None = None


class _BatchOutput(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    rids: list[str]
    http_worker_ipcs: Any = None


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How the scheduler draws the tokens of a request; 0.5.16 reads it as a map.

    Its fields are in the order of 0.5.17. Those that are nil here are never set.
    """

    max_new_tokens: int = 128
    stop: None = None
    stop_token_ids: list[int] | None = None
    stop_regex: None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = ALL_TOKENS
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    json_schema: None = None
    regex: None = None
    ebnf: None = None
    structural_tag: None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: None = None
    sampling_seed: int | None = None
    custom_params: None = None
    stop_strs: list[str] | None = None
    stop_regex_strs: list[str] | None = None
    stop_str_max_len: int = 0
    stop_regex_max_len: int = 0
    is_normalized: bool = False


class ArraySamplingParams(SamplingParams, array_like=True, kw_only=True):
    """The same as 0.5.17 reads it: an array without a name."""


def sampling_params_type(version: str) -> type[SamplingParams]:
    """Return the form in which this version of SGLang reads sampling parameters."""
    return SamplingParams if version == "0.5.16" else ArraySamplingParams


class TokenizedGenerateReqInput(_Request, kw_only=True):
    """One request. `input_ids` is the pair of a type code of Python's `array` and its bytes."""

    input_text: None = None
    input_ids: tuple[str, bytes]
    input_embeds: None = None
    mm_inputs: None = None
    token_type_ids: None = None
    sampling_params: SamplingParams
    return_logprob: bool = True
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: None = None
    stream: bool = False


class RoutedGenerateReqInput(
    TokenizedGenerateReqInput, tag="TokenizedGenerateReqInput", kw_only=True
):
    """One request that asks for its routes from the row `routed_experts_start_len` on.

    Its fields are those of SGLang 0.5.17; 0.5.16 has them at other places.
    """

    return_sampling_mask: bool = False
    return_flat_raw_top_logprobs: bool = False
    return_hidden_states: bool = False
    return_routed_experts: bool = True
    routed_experts_start_len: int = 0


TensorMessage = tuple[list[int], str, bytes]  # how SGLang writes a tensor: shape, dtype and bytes


class BatchTokenIDOutput(_BatchOutput, kw_only=True):
    """Tokens that requests got since they were last heard of: entry m belongs to `rids[m]`."""

    finished_reasons: list[dict[str, Any] | None]
    decoded_texts: Any = None
    decode_ids: Any = None
    read_offsets: Any = None
    output_ids: list[tuple[str, bytes]]
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    no_stop_trim: Any = None
    prompt_tokens: Any = None
    reasoning_tokens: Any = None
    completion_tokens: Any = None
    cached_tokens: Any = None
    input_token_logprobs_val: Any = None
    input_token_logprobs_idx: Any = None
    output_token_logprobs_val: list[list[float] | None] | None = None
    output_token_logprobs_idx: Any = None
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
    routed_experts: list[TensorMessage | None] | None = None
    indexer_topk: Any = None
    placeholder_tokens_idx: Any = None
    placeholder_tokens_val: Any = None
    retraction_counts: list[int] | None = None


class AbortReq(_Request, kw_only=True):
    """Asks to end the requests whose rid begins with `rid`, or says that one in the queue ended."""

    abort_all: bool = False
    finished_reason: dict[str, Any] | None = None
    abort_message: str | None = None


class FlushCacheReqInput(_Request, kw_only=True):
    """Asks to forget all K/V, once the scheduler has been idle within `timeout_s`."""

    timeout_s: float | None = None


class FlushCacheReqOutput(_Request, kw_only=True):
    success: bool
    message: str = ""


class ReleaseMemoryOccupationReqInput(_Request, kw_only=True):
    """Asks to give back the memory under `tags`. A busy scheduler dies of it."""

    tags: list[str] | None = None


class ReleaseMemoryOccupationReqOutput(_Request, kw_only=True):
    pass


class ResumeMemoryOccupationReqInput(_Request, kw_only=True):
    tags: list[str] | None = None


class ResumeMemoryOccupationReqOutput(_Request, kw_only=True):
    pass


class RpcReqInput(_Request, kw_only=True):
    """Calls a method of the scheduler, with values that are no containers."""

    method: str
    parameters: dict[str, bool | int | float | str | None] | None = None


class RpcReqOutput(_Request, kw_only=True):
    success: bool
    message: str


SchedulerMessage = (
    BatchTokenIDOutput
    | AbortReq
    | FlushCacheReqOutput
    | ReleaseMemoryOccupationReqOutput
    | ResumeMemoryOccupationReqOutput
)
SENT = (
    TokenizedGenerateReqInput,
    AbortReq,
    FlushCacheReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    RpcReqInput,
)
RECEIVED = (
    BatchTokenIDOutput,
    AbortReq,
    FlushCacheReqOutput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqOutput,
    RpcReqOutput,
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SchedulerMessage)
_rpc_decoder = msgspec.msgpack.Decoder(RpcReqOutput)


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> SchedulerMessage:
    """Return the message that the scheduler sent. Raises: SpmdError if it is none of ours."""
    return _decode(_decoder, data)


def decode_rpc(data: bytes) -> RpcReqOutput:
    """Return the answer to a call. Raises: SpmdError if it is none."""
    return _decode(_rpc_decoder, data)


def _decode(decoder: Any, data: bytes) -> Any:
    """Decode one message.

    A pickle is refused before the decoder sees it: it begins with 0x80, and an array never does.
    """
    if not data or data[0] == _PICKLED or data[0] not in _ARRAY_BYTES:
        first = f"0x{data[0]:02x}" if data else "nothing"
        raise SpmdError(
            f"SGLang's scheduler sent a message that begins with {first}, which is no msgpack "
            "array: let SGLANG_USE_PICKLE_IPC be unset, and report the version of SGLang"
        )
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise SpmdError(f"SGLang's scheduler sent a message of an unknown form: {error}") from error


def token_array(tokens: NDArray[np.int32]) -> tuple[str, bytes]:
    """Return tokens as SGLang writes an `array`. Shape: [T]."""
    return "q", tokens.astype(np.int64).tobytes()


def token_ids(array: tuple[str, bytes]) -> NDArray[np.int32]:
    """Return the tokens of an `array` that SGLang wrote. Shape: [T]."""
    typecode, data = array
    return np.frombuffer(data, np.dtype(typecode)).astype(np.int32)


def field_lists(returns_routes: bool = False) -> dict[str, list[str]]:
    """Return the fields of each mirror, which must begin those of SGLang's struct of its name.

    Requests may ask for routes if the child `returns_routes`.
    """
    mirrors = dict.fromkeys((*SENT, *RECEIVED, SamplingParams))
    fields = {mirror.__name__: list(mirror.__struct_fields__) for mirror in mirrors}
    if returns_routes:
        request = TokenizedGenerateReqInput.__name__
        fields[request] = list(RoutedGenerateReqInput.__struct_fields__)
    return fields
