"""Token ids in and out: the wire of verifiers' `/inference/v1/generate`."""

from __future__ import annotations

from spmd_rl.data.logs.form import Json
from spmd_rl.gateway.dialects.asked import Asked, Drawn, Refused, SamplingRules
from spmd_rl.gateway.dialects.fields import RequestFields


def read(body: Json, rules: SamplingRules) -> Asked:
    """Return what a body asks for. Raises: Refused."""
    fields = RequestFields(body)
    ids = fields.ids("token_ids")
    if not len(ids):
        raise Refused("token_ids", "expected at least one token id")
    given = RequestFields(fields.take("sampling_params", dict, {}))
    fields.only("stream", False, because="this endpoint answers as a whole")
    fields.ignore("cache_salt", "priority", "request_id")
    model, ignored = fields.take("model", str, ""), fields.finish()
    try:
        sampling = given.sampling(rules)
        given.only("n", 1, because="a session draws one reply a call")
        given.only("logprobs", 0, 1, because="only the log-prob of the drawn token is known")
        given.only("skip_special_tokens", False, because="the answer is in token ids")
        given.only("min_tokens", 0)
        for name in ("presence_penalty", "frequency_penalty"):
            given.only(name, 0)
        given.only("repetition_penalty", 1)
        given.ignore("seed", "spaces_between_special_tokens", "include_stop_str_in_output")
        return Asked(
            model=model,
            token_ids=ids,
            max_tokens=given.number("max_tokens"),
            stops=given.texts("stop"),
            stop_ids=tuple(given.ids("stop_token_ids").tolist()),
            sampling=sampling,
            ignored=(*ignored, *given.finish()),
        )
    except Refused as error:
        raise error.inside("sampling_params") from error


def answer(asked: Asked, drawn: Drawn) -> Json:
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
