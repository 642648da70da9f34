"""Thoughts of a real model: its budget, and a structure behind it, by the Python calls."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve import LLM, AsyncLLM, EngineOptions, SamplingParams, Structure
from jaxserve.errors import ChatError, RequestError

pytestmark = pytest.mark.system
BUNDLED = Path(__file__).parents[2] / "checkpoints" / "bundled" / "tiny-chat-draft"
BEGIN, END = 2046, 2047  # tokens that stand for <think> and </think>
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)
ASKED = [{"role": "user", "content": "What is 7 plus 5?"}]
PARAMS = SamplingParams(temperature=0.7, seed=5, max_tokens=40, ignore_eos=True)
BOUNDED = SamplingParams(temperature=0.7, seed=5, max_tokens=40)
CHOICE = Structure.of("choice", ["twelve", "It is 12."])
OPTIONS = EngineOptions(max_batch=4, cache_tokens=1024, max_context=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the bundled model in which two rare tokens are marks of thoughts."""
    made = tmp_path_factory.mktemp("thinks") / "model"
    shutil.copytree(BUNDLED, made)
    (made / "tokenizer.model").unlink()
    (made / "chat_template.jinja").write_text(TEMPLATE)
    file = made / "tokenizer.json"
    fields = json.loads(file.read_text())
    vocabulary = fields["model"]["vocab"]
    renamed = {BEGIN: "<think>", END: "</think>"}
    gone = {name for name, id in vocabulary.items() if id in renamed}
    for name in gone:
        del vocabulary[name]
    vocabulary |= {name: id for id, name in renamed.items()}
    merges = fields["model"]["merges"]
    fields["model"]["merges"] = [pair for pair in merges if not _makes(pair, gone)]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    fields["added_tokens"] += [{"id": id, "content": name, **plain} for id, name in renamed.items()]
    file.write_text(json.dumps(fields))
    return made


def _makes(pair: str | list[str], names: set[str]) -> bool:
    """Return whether a merge makes one of the names, or needs one."""
    parts = pair.split(" ") if isinstance(pair, str) else pair
    return not names.isdisjoint([*parts, "".join(parts)])


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", options=OPTIONS) as made:
        yield made


def test_a_budget_closes_the_thought(llm: LLM) -> None:
    free, bounded, stopped = (
        llm.chat(ASKED, PARAMS)[0],
        llm.chat(ASKED, PARAMS, thinking_budget=9)[0],
        next(
            delta.completion
            for delta in llm.stream(ASKED, PARAMS, thinking_budget=9, max_tokens=10)
            if delta.completion
        ),
    )
    assert END not in free.token_ids
    closing = tuple(llm.prompts.tokenizer.encode_special("\n</think>\n\n"))
    assert END in closing
    size = len(closing)
    assert tuple(bounded.token_ids[: 9 + size]) == (*free.token_ids[:9], *closing)
    assert list(stopped.token_ids) == list(bounded.token_ids[:10])


def test_a_structure_follows_the_thought(llm: LLM) -> None:
    (found,) = llm.chat(ASKED, BOUNDED, thinking_budget=9, structure=CHOICE)
    thought, answer = found.text.split("</think>")
    assert thought and answer.strip() in ("twelve", "It is 12.")
    assert found.finish_reason == "stop"
    (plain,) = llm.chat(ASKED, BOUNDED, enable_thinking=False, structure=CHOICE)
    assert plain.text in ("twelve", "It is 12.")
    # Without a budget the thought may take all there is.
    (cut,) = llm.chat(ASKED, BOUNDED, structure=CHOICE)
    assert cut.finish_reason == "length" and "</think>" not in cut.text


def test_without_a_thought(llm: LLM) -> None:
    prompt = llm.chat(ASKED, PARAMS, reasoning_effort="none")[0].prompt
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert (
        prompt == llm.chat(ASKED, PARAMS, chat_template_kwargs={"enable_thinking": False})[0].prompt
    )


def test_options_that_are_refused(llm: LLM) -> None:
    with pytest.raises(ChatError, match="verbosity: has no effect"):
        llm.chat(ASKED, verbosity="low")
    with pytest.raises(RequestError, match="reasoning_effort is 'much'; it must be one of none"):
        llm.chat(ASKED, reasoning_effort="much")
    with pytest.raises(RequestError, match="thinking_budget is for a conversation"):
        next(iter(llm.stream("Once", thinking_budget=9)))


def test_coroutines_have_the_same(folder: Path, llm: LLM) -> None:
    expected = llm.chat(ASKED, PARAMS, thinking_budget=9)[0].token_ids

    async def main() -> None:
        made = AsyncLLM(folder, dtype="float32", options=OPTIONS)
        try:
            (found,) = await made.chat(ASKED, PARAMS, thinking_budget=9)
            assert found.token_ids == expected
            deltas = [d async for d in made.stream(ASKED, PARAMS, thinking_budget=9)]
            assert deltas[-1].completion and deltas[-1].completion.token_ids == expected
        finally:
            await made.close()

    asyncio.run(main())
