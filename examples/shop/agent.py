"""A program that answers what things cost, with a model behind an OpenAI endpoint and a tool.

It is an ordinary client: it knows an address and a key, and nothing of training. The model looks up
one thing at a time, and the program tells it the price.

    python examples/shop/agent.py URL KEY MODEL    # asks one question of any such endpoint
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from typing import Any

CALLS = 3  # of the model, in one conversation
SYSTEM = (
    "You are a clerk in a shop, but you know no prices. "
    "To ask for a price, write LOOKUP: and the thing. You are told its price. "
    "When you know the price, write PRICE: and the number."
)
EXAMPLE = [
    {"role": "user", "content": "What does a drum cost?"},
    {"role": "assistant", "content": "LOOKUP: drum"},
    {"role": "user", "content": "drum: 81"},
    {"role": "assistant", "content": "PRICE: 81"},
]


def chat(base_url: str, key: str, model: str, messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": model, "messages": messages}).encode()
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        data=body,
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    content: str = answer["choices"][0]["message"]["content"]
    return content


def serve_customer(
    base_url: str, key: str, question: str, prices: dict[str, int], model: str = "policy"
) -> tuple[str, list[str]]:
    """Return the last reply of the model, and the things that it looked up."""
    messages = [{"role": "system", "content": SYSTEM}, *EXAMPLE]
    messages.append({"role": "user", "content": question})
    found: list[str] = []
    for _ in range(CALLS):
        reply = chat(base_url, key, model, messages)
        asked = re.match(r"\s*LOOKUP:\s*(?:an?\s|the\s)?\s*([a-z ]+?)\s*$", reply)
        if asked is None:
            return reply, found
        thing = asked[1]
        found.append(thing)
        price = f"{thing}: {prices[thing]}" if thing in prices else f"there is no {thing}"
        messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": price})
    return reply, found


def play(base_url: str, key: str, task: dict[str, Any]) -> dict[str, float]:
    """Serve the customer of a record. The reward is 1 for the right price."""
    facts = task["meta"]
    reply, found = serve_customer(base_url, key, task["question"], facts["prices"])
    said = re.match(r"\s*PRICE:\s*(\d+)\s*\.?\s*$", reply)
    is_right = said is not None and int(said[1]) == facts["total"]
    return {"reward": float(is_right), "looked_up": float(set(found) >= set(facts["things"]))}


def main() -> int:
    base_url, key, model = sys.argv[1:]
    print(serve_customer(base_url, key, "What does a lamp cost?", {"lamp": 37}, model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
