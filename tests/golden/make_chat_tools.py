"""Writes chat_tools.json: conversations with tools as text, by transformers' own rendering.

    python tests/golden/make_chat_tools.py

Needs transformers (5.23.0 made the committed file) and jinja2; not part of the tests' environment.

Each case has `template`, `tools`, `messages` as OpenAI's clients send them, with arguments as JSON
text, and `text`, the answer. The templates are ours, each in the way of a published one; that of
DeepSeek-R1 is the published one, which takes no tools. transformers gets arguments as the template
wants them: as objects, or as text.
"""

import copy
import json
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import (  # pyright: ignore[reportMissingImports]
    render_jinja_template,
)

OUT = Path(__file__).with_name("chat_tools.json")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather <now>, "as it is" & naïve 日本語.',
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string"},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location"],
        },
    },
}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED = [{"role": "user", "content": "Is it warmer in 東京 than in Paris?"}]
ONE = [
    {"role": "system", "content": "Be brief."},
    *ASKED,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            call("a1B2c3D4e", "get_weather", '{"location": "Paris", "days": [1, 2.50, null]}')
        ],
    },
    {"role": "tool", "tool_call_id": "a1B2c3D4e", "content": '{"celsius": 7}'},
]
TWO = [
    *ASKED,
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            call("a1B2c3D4e", "get_weather", '{"location": "東京"}'),
            call("000000000", "add", "{}"),
        ],
    },
    {"role": "tool", "tool_call_id": "a1B2c3D4e", "content": "12"},
    {"role": "tool", "tool_call_id": "000000000", "content": "0"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Thanks."},
]
HERMES = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Functions within <tools></tools>:
<tools>
{%- for tool in tools %}

{{ tool | tojson }}
{%- endfor %}

</tools>
Call them so: <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{{ message.content or '' }}
{%- for tool_call in message.tool_calls or [] %}
{%- set function = tool_call.function %}

<tool_call>
{"name": "{{ function.name }}", "arguments": {% if function.arguments is string %}{{ function.arguments }}
{%- else %}{{ function.arguments | tojson }}{% endif %}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' and loop.last and tools is not none %}
{{- '<|start_header_id|>user<|end_header_id|>\n\nFunctions:\n' }}
{%- for t in tools %}{{ t | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}
{{- message.content | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- for tool_call in message.tool_calls %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + tool_call.function.name + '", "parameters": ' }}
{{- tool_call.function.arguments | tojson + '}<|eot_id|>' }}
{%- endfor %}
{%- elif message.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and loop.last %}
{{- '[AVAILABLE_TOOLS] [' }}
{%- for tool in tools %}
{{- '{"type": "function", "function": {' }}
{%- for key, val in tool.function.items() %}
{{- '"' + key + '": ' + (val if val is string else val | tojson) }}{{- '' if loop.last else ', ' }}
{%- endfor %}
{{- '}}' + (']' if loop.last else ', ') }}
{%- endfor %}
{{- '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined %}
{{- '[TOOL_CALLS] [' }}
{%- for tool_call in message.tool_calls %}
{%- set out = tool_call.function | tojson %}
{%- if tool_call.id is not defined or tool_call.id | length != 9 %}
{{- raise_exception('ids have 9 letters') }}
{%- endif %}
{{- out[:-1] + ', "id": "' + tool_call.id + '"}' + (']' + eos_token if loop.last else ', ') }}
{%- endfor %}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
{{- '[/TOOL_RESULTS]' }}
{%- else %}
{{- ' ' + message.content + eos_token }}
{%- endif %}
{%- endfor %}"""
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}


def published() -> str:
    """That of DeepSeek-R1, from the other golden file."""
    cases = json.loads(OUT.with_name("chat_ids.json").read_text(encoding="utf-8"))
    (files,) = [case["files"] for case in cases if case["name"] == "deepseek r1"]
    return json.loads(files["tokenizer_config.json"])["chat_template"]


def with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = copy.deepcopy(messages)
    for message in messages:
        for made in message.get("tool_calls", ()):
            made["function"]["arguments"] = json.loads(made["function"]["arguments"])
    return messages


def answered(
    name: str, template: str, tools: list[Any] | None, messages: list[Any], objects: bool
) -> dict[str, Any]:
    (text,), _ = render_jinja_template(
        conversations=[with_objects(messages) if objects else messages],
        tools=tools,
        chat_template=template,
        add_generation_prompt=True,
        **TOKENS,
    )
    return {"name": name, "template": template, "tools": tools, "messages": messages, "text": text}


if __name__ == "__main__":
    answers = [
        answered(name, template, tools, messages, name != "deepseek r1")
        for name, template in (
            ("hermes", HERMES),
            ("llama", LLAMA),
            ("mistral", MISTRAL),
            ("deepseek r1", published()),
        )
        for tools in ((None,) if name == "deepseek r1" else (None, [WEATHER, ADD]))
        for messages in (ASKED, ONE, TWO)
    ]
    lines = ",\n".join(json.dumps(answer, ensure_ascii=False) for answer in answers)
    OUT.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
