"""Token ids in and out: the wire of verifiers' `/inference/v1/generate`."""

from __future__ import annotations

from spmd_rl.data.logs.form import Json
from spmd_rl.gateway.dialects.fields import RequestFields
from spmd_rl.gateway.dialects.request import PolicyReply, Refused, ReplyRequest, SamplingRules


def read(body: Json, rules: SamplingRules) -> ReplyRequest:
    """Return what a body asks for. Raises: Refused."""
    fields = RequestFields(body, rules)
    ids = fields.ids("token_ids")
    if not len(ids):
        raise Refused("token_ids", "expected at least one token id")
    given = RequestFields(fields.take("sampling_params", dict, {}), rules)
    fields.only("stream", False, because="this endpoint answers as a whole")
    fields.neutral()
    model = fields.take("model", str, "")
    try:
        sampling = given.sampling()
        given.only("logprobs", 0, 1, because="only the log-prob of the drawn token is known")
        given.only("skip_special_tokens", False, because="the answer is in token ids")
        given.ignore("include_stop_str_in_output")
        given.neutral()
        return ReplyRequest(
            model=model,
            token_ids=ids,
            max_tokens=given.number("max_tokens"),
            stops=given.texts("stop"),
            stop_ids=tuple(given.ids("stop_token_ids").tolist()),
            sampling=sampling,
            ignored=(*fields.ignored, *given.ignored),
            unknown=(*fields.unknown, *(f"sampling_params.{one}" for one in given.unknown)),
        )
    except Refused as error:
        raise error.inside("sampling_params") from error


def answer(asked: ReplyRequest, drawn: PolicyReply) -> Json:
    """Return the answer, whose log-probs come back bit for bit."""
    ids = drawn.data.tokens.tolist()
    rows = [
        {"token": f"token_id:{token}", "logprob": value}
        for token, value in zip(ids, drawn.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": "length" if drawn.finish == "length" else "stop",
        "logprobs": {"content": rows},
        **drawn.token_facts(),
    }
    return {"request_id": drawn.begun.id, "model": drawn.begun.model, "choices": [choice]}
