"""anthropic: a loop of messages with one tool, whole or streamed."""

import sys

from anthropic import Anthropic

_, root_url, key, way = sys.argv[1:]
client = Anthropic(base_url=root_url, api_key=key)
numbers = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}}
tools = [{"name": "add", "description": "adds", "input_schema": numbers}]
messages = [{"role": "user", "content": "Add 12345 and 67890."}]
given = {"model": "m", "max_tokens": 999, "tools": tools, "system": "You add."}
while True:
    if way == "whole":
        said = client.messages.create(messages=messages, **given)
    else:
        with client.messages.stream(messages=messages, **given) as stream:
            said = stream.get_final_message()
    messages.append({"role": "assistant", "content": said.content})
    calls = [block for block in said.content if block.type == "tool_use"]
    if not calls:
        print(said.content[0].text)
        break
    results = [
        {
            "type": "tool_result",
            "tool_use_id": one.id,
            "content": str(one.input["a"] + one.input["b"]),
        }
        for one in calls
    ]
    messages.append({"role": "user", "content": results})
count = client.messages.count_tokens(model="m", messages=messages[:1], tools=tools)
assert count.input_tokens > 0
