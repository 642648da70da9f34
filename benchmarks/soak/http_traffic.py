"""Actions over HTTP that are answered: completions, conversations, tools, grammars and the rest."""

import json
import random
from uuid import uuid4

from benchmarks.soak.http_calls import (
    CHAT,
    COMPLETIONS,
    Body,
    check,
    events,
    message_of,
    post,
    streamed,
)
from benchmarks.soak.outcomes import UnexpectedError
from benchmarks.soak.target import Action, Target, connections
from benchmarks.soak.texts import TEXTS, messages, schema, structures, tools


def prompt(dice: random.Random, most_tokens: int = 40) -> Body:
    return {"prompt": dice.choice(TEXTS), "max_tokens": dice.randint(1, most_tokens)}


async def http_whole(target: Target, dice: random.Random) -> None:
    await post(target, COMPLETIONS, prompt(dice) | {"logprobs": dice.choice([None, 0, 3])})


async def http_stream(target: Target, dice: random.Random) -> None:
    chunks = await streamed(target, COMPLETIONS, prompt(dice, 60))
    if "usage" not in chunks[-1]:
        raise UnexpectedError("stream without usage", str(chunks[-1]))


async def echo(target: Target, dice: random.Random) -> None:
    body = prompt(dice, 8) | {"echo": True, "logprobs": dice.randint(0, 5)}
    answer = await post(target, COMPLETIONS, body)
    if not answer["choices"][0]["text"].startswith(body["prompt"]):
        raise UnexpectedError("echo without its prompt", str(answer))


async def several_choices(target: Target, dice: random.Random) -> None:
    n = dice.randint(2, 8)
    answer = await post(target, COMPLETIONS, prompt(dice, 20) | {"n": n})
    if len(answer["choices"]) != n:
        raise UnexpectedError("other number of choices", f"{len(answer['choices'])} of {n}")


async def several_prompts(target: Target, dice: random.Random) -> None:
    texts = dice.choices(TEXTS, k=dice.randint(2, 5))
    body: Body = {"prompt": texts, "max_tokens": 12}
    if dice.random() < 0.5:
        await streamed(target, COMPLETIONS, body)
    else:
        await post(target, COMPLETIONS, body)


async def http_chat(target: Target, dice: random.Random) -> None:
    body = {"messages": messages(dice), "max_tokens": 30, "logprobs": True, "top_logprobs": 2}
    await message_of(target, body, dice.random() < 0.5)


async def json_schema(target: Target, dice: random.Random) -> None:
    form: Body = {"name": "thing", "schema": schema(dice)}
    wanted = {"type": "json_schema", "json_schema": form}
    body = {"messages": messages(dice), "max_tokens": 120, "response_format": wanted}
    message = await message_of(target, body, dice.random() < 0.5)
    if message["finish_reason"] == "stop":
        if json.loads(message["content"]).keys() != form["schema"]["properties"].keys():
            raise UnexpectedError("text does not follow its schema", message["content"])
        target.outcomes.checked["texts of schemas over HTTP"] += 1


async def other_structures(target: Target, dice: random.Random) -> None:
    body = prompt(dice) | {"response_format": structures(dice), "max_tokens": 60}
    await post(target, COMPLETIONS, body)


def offer(dice: random.Random, max_tokens: int = 120) -> Body:
    offered = [{"type": "function", "function": tool} for tool in tools(dice)]
    return {"messages": messages(dice), "max_tokens": max_tokens, "tools": offered}


async def required_tool(target: Target, dice: random.Random) -> None:
    parallel = dice.random() < 0.5
    body = offer(dice) | {"tool_choice": "required", "parallel_tool_calls": parallel}
    await check_calls(target, body, {"add", "paint"}, dice.random() < 0.5)


async def named_tool(target: Target, dice: random.Random) -> None:
    name = dice.choice(["add", "paint"])
    choice = {"type": "function", "function": {"name": name}}
    body = offer(dice) | {"tool_choice": choice, "parallel_tool_calls": False}
    await check_calls(target, body, {name}, dice.random() < 0.5)


async def auto_tool(target: Target, dice: random.Random) -> None:
    body = offer(dice, 40)
    for entry in body["tools"]:
        entry["function"]["strict"] = dice.random() < 0.5
    await message_of(target, body, dice.random() < 0.5)


async def check_calls(target: Target, body: Body, names: set[str], stream: bool) -> None:
    """Ask for required calls, and check those that are whole."""
    message = await message_of(target, body, stream)
    if message["finish_reason"] not in ("tool_calls", "length"):
        raise UnexpectedError(f"required call, finish {message['finish_reason']}", str(message))
    if message["finish_reason"] == "tool_calls" and not message["tool_calls"]:
        raise UnexpectedError("required call, and none made", str(message))
    for call in message["tool_calls"]:
        if call["name"] not in names or not json.loads(call["arguments"]):
            raise UnexpectedError("call of another function, or without arguments", str(message))
    target.outcomes.checked["tool calls over HTTP"] += len(message["tool_calls"])


async def tool_history(target: Target, dice: random.Random) -> None:
    made = {"name": "add", "arguments": '{"a": 7, "b": 5}'}
    call: Body = {"id": "a1B2c3D4e", "type": "function", "function": made}
    past = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "12"},
    ]
    body = offer(dice, 20)
    await post(target, CHAT, body | {"messages": [*body["messages"], *past]})


async def tokens(target: Target, dice: random.Random) -> None:
    ids = (await post(target, "/tokenize", {"prompt": dice.choice(TEXTS)}))["tokens"]
    await post(target, "/tokenize", {"messages": messages(dice), "return_token_strs": True})
    await post(target, "/detokenize", {"tokens": ids})


async def pages(target: Target, dice: random.Random) -> None:
    for path in ("/metrics", "/health", "/ping", "/v1/models", "/version", "/tokenizer_info", "/"):
        response = await target.http.get(path)
        check(response, response.text, 200)


async def live(target: Target, dice: random.Random) -> None:
    async with target.http.stream("GET", "/live") as response:
        check(response, "", 200, 429)  # of more watchers than --max-watchers
        async for _ in response.aiter_lines():
            return


async def new_connection(target: Target, dice: random.Random) -> None:
    async with connections(str(target.http.base_url)) as http:
        response = await http.post(COMPLETIONS, json=prompt(dice, 8))
        check(response, response.text, 200)


async def same_id(target: Target, dice: random.Random) -> None:
    body = {"prompt": dice.choice(TEXTS), "max_tokens": 100, "ignore_eos": True}
    given = body | {"request_id": f"same-{uuid4()}"}
    async with target.http.stream("POST", COMPLETIONS, json=given | {"stream": True}) as response:
        chunks = events(response)
        await anext(chunks)
        second = await target.http.post(COMPLETIONS, json=given | {"max_tokens": 1})
        check(second, second.text, 409, 200)  # 200: the first has ended meanwhile
        target.outcomes.refused += second.status_code == 409
        async for _ in chunks:
            pass


async def deadline(target: Target, dice: random.Random) -> None:
    seconds = f"{dice.uniform(0.01, 0.2):.3f}"
    body = {"prompt": dice.choice(TEXTS), "max_tokens": 300, "ignore_eos": True}
    headers = {"x-request-timeout": seconds}
    response = await target.http.post(COMPLETIONS, json=body, headers=headers)
    check(response, response.text, 504, 429, 200)  # 429: the queue is longer than the deadline
    target.outcomes.refused += response.status_code != 200


ACTIONS: tuple[Action, ...] = (
    http_whole,
    http_stream,
    echo,
    several_choices,
    several_prompts,
    http_chat,
    json_schema,
    other_structures,
    required_tool,
    named_tool,
    auto_tool,
    tool_history,
    tokens,
    pages,
    live,
    new_connection,
    same_id,
    deadline,
)
