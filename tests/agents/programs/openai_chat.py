"""openai: a loop of chat completions with one tool, whole or streamed."""

import json
import sys

from openai import OpenAI

base_url, _, key, way = sys.argv[1:]
client = OpenAI(base_url=base_url, api_key=key)
numbers = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}}
tools = [{"type": "function", "function": {"name": "add", "parameters": numbers}}]
messages = [{"role": "user", "content": "Add 12345 and 67890."}]


def ask():
    if way == "whole":
        return client.chat.completions.create(model="m", messages=messages, tools=tools)
    with client.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
        return stream.get_final_completion()


while True:
    said = ask().choices[0].message
    if not said.tool_calls:
        print(said.content)
        break
    # as most agents send it back
    calls = [one.model_dump(include={"id", "type", "function"}) for one in said.tool_calls]
    for one in calls:
        one["function"] = {key: one["function"][key] for key in ("name", "arguments")}
    messages.append({"role": "assistant", "content": said.content, "tool_calls": calls})
    for one in calls:
        given = json.loads(one["function"]["arguments"])
        result = str(given["a"] + given["b"])
        messages.append({"role": "tool", "tool_call_id": one["id"], "content": result})
