"""openai: a loop of Responses with one tool, whole or streamed."""

import json
import sys

from openai import OpenAI

base_url, _, key, way = sys.argv[1:]
client = OpenAI(base_url=base_url, api_key=key)
numbers = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}}
tools = [{"type": "function", "name": "add", "parameters": numbers}]
items = [{"role": "user", "content": "Add 12345 and 67890."}]
while True:
    if way == "whole":
        said = client.responses.create(model="m", input=items, tools=tools)
    else:
        with client.responses.stream(model="m", input=items, tools=tools) as stream:
            said = stream.get_final_response()
    items += [one.model_dump(exclude_none=True) for one in said.output]
    calls = [one for one in said.output if one.type == "function_call"]
    if not calls:
        print(said.output_text)
        break
    for one in calls:
        given = json.loads(one.arguments)
        result = {"call_id": one.call_id, "output": str(given["a"] + given["b"])}
        items.append({"type": "function_call_output", **result})
