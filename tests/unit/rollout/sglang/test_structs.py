"""The mirrors of SGLang's structs against the fake's own copies; pickles are refused."""

from __future__ import annotations

import pickle
import socket
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from spmd_rl.errors import SpmdError
from spmd_rl.rollout.sglang import structs
from spmd_rl.rollout.sglang.client import SchedulerClient
from spmd_rl.rollout.sglang.structs import (
    SENT,
    SamplingParams,
    TokenizedGenerateReqInput,
    decode,
    decode_rpc,
    encode,
    token_array,
    token_ids,
)
from tests.fakes import sglang_child as fake

FAKE_DECODER = msgspec.msgpack.Decoder(fake.Received, dec_hook=fake._decode_array)


def test_a_request_is_what_the_scheduler_reads() -> None:
    params = SamplingParams(
        max_new_tokens=5, stop_token_ids=[3, 4], top_k=1, stop_strs=[], is_normalized=True
    )
    sent = TokenizedGenerateReqInput(
        rid="a.b", input_ids=token_array(np.array([1, 2**31 - 1], np.int32)), sampling_params=params
    )
    read = FAKE_DECODER.decode(encode(sent))
    assert isinstance(read, fake.TokenizedGenerateReqInput)
    assert (read.rid, list(read.input_ids or ())) == ("a.b", [1, 2**31 - 1])
    assert read.return_logprob
    assert not read.stream
    assert read.sampling_params.stop_token_ids == {3, 4}
    assert read.sampling_params.is_normalized
    assert read.sampling_params.stop_strs == []
    assert read.sampling_params.temperature == 1.0


@pytest.mark.parametrize("mirror", SENT + structs.RECEIVED, ids=lambda mirror: mirror.__name__)
def test_fields_begin_those_of_the_scheduler(mirror: type[msgspec.Struct]) -> None:
    actual = getattr(fake, mirror.__name__).__struct_fields__
    assert actual[: len(mirror.__struct_fields__)] == mirror.__struct_fields__


def test_tokens_survive_the_way() -> None:
    tokens = np.array([0, 5, 2**31 - 1], np.int32)
    assert token_ids(token_array(tokens)).tolist() == tokens.tolist()
    assert token_ids(token_array(tokens[:0])).tolist() == []


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_before_it_is_decoded(protocol: int) -> None:
    data = pickle.dumps({"rid": "1"}, protocol)
    assert data[0] == 0x80
    for read in (decode, decode_rpc):
        with pytest.raises(SpmdError, match="begins with 0x80, which is no msgpack array"):
            read(data)


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"\x81\xa1a\x01", pickle.dumps(1, 0), msgspec.msgpack.encode("text")]
)
def test_what_is_no_array_is_refused(data: bytes) -> None:
    with pytest.raises(SpmdError, match="no msgpack array"):
        decode(data)


@pytest.mark.parametrize("value", [["NoSuchStruct", 1], [1], ["AbortReq", 5]])
def test_an_unknown_message_is_refused(value: list[object]) -> None:
    with pytest.raises(SpmdError, match="of an unknown form"):
        decode(msgspec.msgpack.encode(value))


def test_the_sockets_of_a_client_refuse_a_pickle(tmp_path: Path) -> None:
    context = zmq.Context()
    ours, theirs = socket.socketpair()
    client = SchedulerClient(tmp_path, ours.fileno(), lambda: None)
    try:
        peers = [context.socket(zmq.PUSH), context.socket(zmq.DEALER)]
        for name, peer in zip(("answers", "calls"), peers, strict=True):
            peer.connect(f"ipc://{tmp_path / name}")
            peer.send(pickle.dumps("hello"))
        with pytest.raises(SpmdError, match="begins with 0x80"):
            client.receive(60.0)
        with pytest.raises(SpmdError, match="begins with 0x80"):
            client.finish_call("spmd_x", 60.0)
    finally:
        client.close()
        context.destroy(linger=0)
        ours.close()
        theirs.close()
