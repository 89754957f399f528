"""Forms in which models write thoughts and tool calls, by name and by chat template.

A form is a `response_template` of transformers. Its fields are "content", "reasoning_content" and
"tool_calls". A call is the JSON text of an object, or what a transform of the field makes of it.
`BY_DIGEST` names the form of known chat templates: those of the models as TRL 1.16 ships them.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

Form = dict[str, Any]

_CHATML = "<|im_start|>assistant\n"
_VERBATIM = {"content": "text", "content_args": {"strip": False}}
_THOUGHT = {"open": "<think>", "close": "</think>", **_VERBATIM}
_JSON_CALL = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, **_VERBATIM}
_NAMED = {"function": {"name": "{name}", "arguments": "{content}"}}

FORMS: dict[str, Form] = {
    # {"name": ..., "arguments": {...}} between tags
    "hermes": {
        "start_anchor": _CHATML,
        "fields": {
            "content": _VERBATIM,
            "reasoning_content": _THOUGHT,
            "tool_calls": _JSON_CALL,
        },
    },
    # <function=name> with a <parameter=key> for each argument
    "qwen_xml": {
        "start_anchor": _CHATML,
        "fields": {
            "content": _VERBATIM,
            "reasoning_content": _THOUGHT,
            "tool_calls": {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
                },
                "transform": _NAMED,
            },
        },
    },
    # the name, then pairs of <arg_key> and <arg_value>
    "glm": {
        "start_anchor": "<|assistant|>",
        "fields": {
            "content": _VERBATIM,
            "reasoning_content": _THOUGHT,
            "tool_calls": {
                "open_pattern": r"<tool_call>\s*(?P<name>[^<\s]+)\s*(?=<)",
                "close": "</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*"
                    r"<arg_value>(?P<value>.*?)</arg_value>"
                },
                "transform": _NAMED,
            },
        },
    },
    # the whole reply is {"name": ..., "parameters": {...}}
    "llama3": {
        "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "fields": {
            "content": _VERBATIM,
            "tool_calls": {
                "open_pattern": r"\A\s*(?:<\|python_tag\|>\s*)?(?=\{)",
                "repeats": True,
                **_VERBATIM,
            },
        },
    },
    # thoughts, and no tool calls
    "thoughts": {
        "start_anchor_pattern": r"<\uff5cAssistant\uff5c>|<\|im_start\|>assistant\n",
        "fields": {"content": _VERBATIM, "reasoning_content": _THOUGHT},
    },
}

BY_DIGEST = {
    "55b2f4a26ac9ee71": "hermes",  # Qwen2.5
    "a55ee1b1660128b7": "hermes",  # Qwen3
    "64f85b198065d0fb": "hermes",  # Qwen3 Instruct 2507
    "9d879ef91075acbf": "hermes",  # Qwen3-VL
    "273d8e0e683b8850": "qwen_xml",  # Qwen3.5, small
    "a4aee8afcf2e0711": "qwen_xml",  # Qwen3.5
    "e84f32a23fdda276": "qwen_xml",  # Qwen3.6
    "c3cf9e34abf4f9e3": "qwen_xml",  # Qwen3.8
    "43a92aacc2e169bb": "qwen_xml",  # Nemotron 3 Nano
    "3b74d76d8b903752": "qwen_xml",  # Nemotron 3 Super
    "82753bef5cedc493": "qwen_xml",  # Nemotron 3 Ultra
    "58933db77d3099b4": "qwen_xml",  # Nemotron 3.5 Lightning
    "44f815868bf02fa4": "glm",  # GLM-4.5, GLM-4.6
    "93c0e9aa3629bbd7": "llama3",  # Llama 3.1
    "d82792f95932f1c9": "llama3",  # Llama 3.2
    "56a1447ad31926fd": "thoughts",  # DeepSeek-R1 distilled
}


def digest_of(chat_template: str) -> str:
    """Return the digest by which a chat template is known."""
    return sha256(chat_template.strip().encode()).hexdigest()[:16]
