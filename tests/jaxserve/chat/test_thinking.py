"""Options of an answer and the variables of templates that they become.

The templates are written anew and read the variables of published ones, with the same values.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from jaxserve.chat import Chat, TemplateOptions
from jaxserve.chat.renderer import TemplateRenderer
from jaxserve.chat.template_variables import neighbours
from jaxserve.chat.tools import Choice, tools_of
from jaxserve.errors import ChatError, RequestError
from jaxserve.prompts import Rendered
from jaxserve.structure import Structure
from jaxserve.structure.grammars import Grammars
from tests.byte_tokenizer import ByteTokenizer

THINK, END = 300, 301
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
ASKED = [{"role": "user", "content": "Hello"}]
# As of Qwen3, DeepSeek-V3.1, Kimi K2.5, Cohere, MiniMax-M3, Ling 3, Seed-OSS, Hunyuan Hy3: what
# follows the turns for an answer with a thought and for one without.
SWITCHED = {
    "enable_thinking": (
        "{% if enable_thinking is defined and enable_thinking is false %}off{% else %}on{% endif %}"
    ),
    "thinking": "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    "{{ 'on' if thinking else 'off' }}",
    "reasoning": "{% set reasoning = reasoning if reasoning is not undefined else true %}"
    "{{ 'on' if reasoning else 'off' }}",
    "thinking_mode": "{{ 'off' if thinking_mode is defined and thinking_mode == 'disabled' "
    "else 'on' }}",
    "thinking_option": "{% if thinking_option is not defined %}{% set thinking_option = 'on' %}"
    "{% endif %}{{ 'off' if thinking_option == 'off' else 'on' }}",
    "thinking_budget": "{% if thinking_budget is not defined %}{% set thinking_budget = -1 %}"
    "{% endif %}{{ 'off' if thinking_budget == 0 else 'on' }}",
    "reasoning_effort": "{% set effort = reasoning_effort | default('no_think') %}"
    "{% if effort not in ['no_think', 'low', 'high'] %}{{ raise_exception('no such effort') }}"
    "{% endif %}{{ 'off' if effort == 'no_think' else 'on' }}",
}
ChatOf = Callable[..., Chat]


class Tokens(ByteTokenizer):
    special_tokens = MappingProxyType(
        {**ByteTokenizer.special_tokens, "<think>": THINK, "</think>": END, "<|end|>": 302}
    )

    def encode_special(self, text: str) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, self.special_tokens)) + ")", text)
        return [i for part in parts for i in self._encode_part(part)]


class Calls(Tokens):
    special_tokens = MappingProxyType(
        {**ByteTokenizer.special_tokens, "<think>": THINK, "</think>": END, "<tool_call>": 302}
    )


class Letters(ByteTokenizer):
    """Tokenizer without marks of thoughts."""


@pytest.fixture
def chat_of(tmp_path: Path) -> Iterator[ChatOf]:
    """Return a function that opens a folder whose template writes turns and then this."""
    chats = list[Chat]()

    def opened(rest: str, tokenizer: ByteTokenizer | None = None, **options: Any) -> Chat:
        folder = tmp_path / str(len(chats))
        folder.mkdir()
        (folder / "chat_template.jinja").write_text(TURNS + rest, encoding="utf-8")
        chats.append(Chat(folder, tokenizer or Tokens(), **options))
        return chats[-1]

    yield opened
    for chat in chats:
        chat.close()


def rendered(chat: Chat, **options: Any) -> Rendered:
    return chat.render(ASKED, options=TemplateOptions(**options))


def written(chat: Chat, **options: Any) -> str:
    """Return what the template writes behind the turns; all options must have an effect."""
    found = rendered(chat, **options)
    assert not found.unread
    return found.text.removeprefix("user: Hello;")


@pytest.mark.parametrize("name", SWITCHED)
def test_each_switch(chat_of: ChatOf, name: str) -> None:
    chat = chat_of(SWITCHED[name])
    for off in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
        assert written(chat, **off) == "off"
    for on in ({"enable_thinking": True}, {"reasoning_effort": "low"}):
        assert written(chat, **on) == "on"
    # The switch is said twice in other words: the plainer one counts.
    assert written(chat, enable_thinking=True, reasoning_effort="none") == "on"
    assert written(chat, enable_thinking=False, reasoning_effort="high") == "off"


def test_efforts_go_into_the_templates_own_variable(chat_of: ChatOf) -> None:
    for name in ("reasoning_effort", "thinking_effort", "reasoning_strength"):
        chat = chat_of("{{ " + name + " | default('usual') }}")
        assert written(chat, reasoning_effort="xhigh") == "xhigh"
        assert written(chat) == "usual"
    flags = chat_of("{{ low_effort | default(0) }} {{ medium_effort | default(0) }}")
    assert written(flags, reasoning_effort="minimal") == "True False"
    assert written(flags, reasoning_effort="medium") == "False True"
    assert written(flags, reasoning_effort="high") == "False False"
    assert written(chat_of("{{ verbosity | default('') }}"), verbosity="low") == "low"
    assert written(chat_of("{{ reasoning_budget }}"), thinking_budget=9) == "9"


@pytest.mark.parametrize(
    ("takes", "nearest"),
    [
        # Qwen3.8 and Mistral Small 4.
        ("xhigh medium low", "low low medium xhigh xhigh xhigh"),
        ("none high", "high high high high high high"),
        # One that takes none refuses in its own words.
        ("", ""),
    ],
)
def test_the_nearest_effort_that_is_taken(chat_of: ChatOf, takes: str, nearest: str) -> None:
    chat = chat_of(
        "{% if reasoning_effort is defined and reasoning_effort not in "
        + repr(takes.split())
        + " %}{{ raise_exception('Unexpected effort ' ~ reasoning_effort) }}{% endif %}"
        "{{ reasoning_effort }}"
    )
    asked = "minimal low medium high xhigh max".split()
    if not takes:
        with pytest.raises(ChatError, match="Unexpected effort high"):
            rendered(chat, reasoning_effort="high")
        return
    assert [written(chat, reasoning_effort=effort) for effort in asked] == nearest.split()
    with pytest.raises(ChatError, match="Unexpected effort"):
        refused = "high" if "high" not in takes.split() else "low"
        rendered(chat, chat_template_kwargs={"reasoning_effort": refused})


def test_an_effort_is_not_tried_where_something_else_is_wrong(chat_of: ChatOf) -> None:
    chat = chat_of("{{ 1 // 0 if reasoning_effort == 'high' else reasoning_effort }}")
    with pytest.raises(ChatError, match="zero"):
        rendered(chat, reasoning_effort="high")
    assert written(chat, reasoning_effort="low") == "low"


def test_options_without_an_effect_are_named(chat_of: ChatOf) -> None:
    plain = chat_of("{{ 'reasoning_effort' }}{% set verbosity = 1 %}{{ verbosity }}")
    for name, value in {
        "reasoning_effort": "none",
        "enable_thinking": True,
        "thinking_budget": 7,
        "verbosity": "medium",
    }.items():
        assert rendered(plain, **{name: value}).unread == (name,)
    given = {"chat_template_kwargs": {"a": 1, "raise_exception": "", "range": 0}}
    assert rendered(plain, **given).unread == (
        "chat_template_kwargs.a",
        "chat_template_kwargs.raise_exception",
        "chat_template_kwargs.range",
    )
    # An effort alone, without a word for none: gpt-oss and Step have no switch.
    effort = chat_of("{{ reasoning_effort }}")
    assert rendered(effort, reasoning_effort="none").unread == ("reasoning_effort",)
    assert rendered(effort, enable_thinking=False).unread == ("enable_thinking",)
    assert rendered(effort, reasoning_effort="low").unread == ()
    # A switch alone is told whether to think, not how much.
    assert rendered(chat_of(SWITCHED["thinking"]), reasoning_effort="low").unread == ()


def test_options_without_an_effect_may_be_refused(chat_of: ChatOf) -> None:
    chat = chat_of("{{ enable_thinking }}", unknown_fields="error")
    assert rendered(chat, enable_thinking=False).text.endswith("False")
    with pytest.raises(ChatError, match="verbosity: has no effect: the chat template of"):
        rendered(chat, verbosity="medium")
    with pytest.raises(ChatError) as failure:
        rendered(chat, chat_template_kwargs={"enable_thinking": True, "thinkin": 1})
    assert failure.value.field == "chat_template_kwargs.thinkin"


def test_variables_are_handed_on_as_they_are(chat_of: ChatOf) -> None:
    chat = chat_of("{{ enable_thinking }} {{ a | tojson }} {{ documents | tojson }}")
    given = {"enable_thinking": "x", "a": [1, {"b": None}], "documents": [{"text": "d"}]}
    text = written(chat, enable_thinking=False, chat_template_kwargs=given)
    assert text == 'x [1, {"b": null}] [{"text": "d"}]'


def test_names_of_tokens_in_variables_are_text(chat_of: ChatOf) -> None:
    chat = chat_of("{{ a }}{{ b.c }}<|end|>")
    given = {"a": "<|end|>", "b": {"c": "</think>"}}
    ids = rendered(chat, chat_template_kwargs=given).token_ids
    assert ids.count(302) == 1 and ids[-1] == 302 and END not in ids


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"reasoning_effort": ["low"]}, "reasoning_effort"),
        ({"verbosity": "none"}, "verbosity"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"enable_thinking": 1.5}, "enable_thinking"),
        ({"thinking_budget": 0}, "thinking_budget"),
        ({"thinking_budget": 2**31}, "thinking_budget"),
        ({"thinking_budget": True}, "thinking_budget"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": object()}}, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {"a": "x" * 2**14}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ],
)
def test_values_that_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as failure:
        TemplateOptions(**options)
    assert failure.value.field == field


def test_a_special_token_is_the_servers(chat_of: ChatOf) -> None:
    chat = chat_of("{{ eos_token }}")
    with pytest.raises(RequestError, match=r"chat_template_kwargs\.eos_token is set by the server"):
        rendered(chat, chat_template_kwargs={"eos_token": "<|end|>"})


def test_what_is_given_is_copied(chat_of: ChatOf) -> None:
    """The caller keeps its objects, and marks reach lists of every kind."""
    given = {"a": ["x"], "b": ("<|end|>",), "c": MappingProxyType({"d": 1})}
    options = TemplateOptions(chat_template_kwargs=given)
    given["a"].append("<|end|>")  # type: ignore[attr-defined]
    chat = chat_of("{% for x in a + b %}{{ x }}{% endfor %}{{ c.d }}")
    found = chat.render(ASKED, options=options)
    assert found.text.endswith("x<|end|>1") and 302 not in found.token_ids


def test_a_failure_of_the_renderer_decides_nothing(
    chat_of: ChatOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = chat_of(
        "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'xhigh'] %}"
        "{{ raise_exception('Unexpected effort') }}{% endif %}{{ reasoning_effort }}"
    )
    renders = TemplateRenderer.render

    def fails(*_: object) -> str:
        monkeypatch.setattr(TemplateRenderer, "render", renders)
        raise ChatError("the chat template was stopped")

    monkeypatch.setattr(TemplateRenderer, "render", fails)
    with pytest.raises(ChatError, match="Unexpected effort"):
        rendered(chat, reasoning_effort="high")
    assert written(chat, reasoning_effort="high") == "xhigh"


def test_a_word_for_no_thought_is_tried(chat_of: ChatOf) -> None:
    """The word that the template compares may be of another variable."""
    chat = chat_of(
        "{% if tool_choice == 'none' %}{% endif %}{% if reasoning_effort is defined and "
        "reasoning_effort not in ['low'] %}{{ raise_exception('Unexpected') }}{% endif %}"
    )
    assert rendered(chat, reasoning_effort="none").unread == ("reasoning_effort",)
    assert rendered(chat, enable_thinking=False).unread == ("enable_thinking",)


@pytest.mark.parametrize(
    ("template", "is_read"),
    [
        ("{% if thinking %}{% endif %}", True),
        ("{% if thinking is not defined %}{% set thinking = true %}{% endif %}", True),
        ("{% set thinking = thinking | default(false) %}", True),
        ("{% set thinking = true if thinking is none else thinking %}", True),
        ("{% set thinking = thinking or false %}", True),
        ("{% for thinking in messages %}{{ thinking }}{% endfor %}", False),
        ("{% if tools %}{% set thinking = 1 %}{% endif %}{{ thinking }}", False),
        ("{% macro m(thinking) %}{{ thinking }}{% endmacro %}", False),
        ("{% if x %}{% set thinking = x %}{% endif %}{{ thinking is string }}", False),
        ("{% set thinking = 1 %}{{ thinking is defined }}", False),
        ("{{ messages[0].thinking }}", False),
    ],
)
def test_variables_that_a_template_reads(chat_of: ChatOf, template: str, is_read: bool) -> None:
    unread = rendered(chat_of(template), enable_thinking=True).unread
    assert unread == (() if is_read else ("enable_thinking",))


def test_neighbours() -> None:
    assert neighbours("high") == ["xhigh", "medium", "max", "low", "minimal"]
    assert neighbours("max") == ["xhigh", "high", "medium", "low", "minimal"]


# ---- budgets


QWEN = (
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
OPENED = "<think>\n{{ '</think>' if false }}"


def test_a_budget_in_tokens(chat_of: ChatOf) -> None:
    found = rendered(chat_of(QWEN), thinking_budget=7)
    assert found.thought_budget and not found.unread
    assert (found.thought_budget.tokens, found.thought_budget.opening) == (7, (THINK,))
    assert found.thought_budget.gap == 10
    assert found.thought_budget.end == END
    assert found.thought_budget.closing == (10, END, 10, 10)
    begun = rendered(chat_of(OPENED), thinking_budget=7).thought_budget
    assert begun and begun.opening == ()
    over = rendered(chat_of(QWEN), thinking_budget=7, enable_thinking=False)
    assert over.thought_budget is None and not over.unread
    assert rendered(chat_of(QWEN)).thought_budget is None


def test_a_budget_needs_marks_that_are_tokens(chat_of: ChatOf) -> None:
    with pytest.raises(ChatError, match="thinking_budget: needs a tokenizer in which </think>"):
        rendered(chat_of(QWEN, Letters()), thinking_budget=7)


# ---- structures behind thoughts


def test_frames(chat_of: ChatOf) -> None:
    assert rendered(chat_of("")).frame == ""
    assert rendered(chat_of(QWEN), enable_thinking=False).frame == ""
    optional = rendered(chat_of(QWEN)).frame
    gap = "/\\n{0,2}/"
    assert optional.startswith(f"start: ({gap} <[{THINK}]> thought {gap})? @body\n")
    begun = rendered(chat_of(OPENED)).frame
    assert begun.startswith("start: thought /\\n{0,2}/ @body\n")
    assert f"thought: <[^256-257,300-302]>* <[{END}]>" in begun


@pytest.fixture
def fits() -> Iterator[Callable[[Structure, list[int]], bool]]:
    """Return a function that says whether tokens are an output that follows a structure."""
    tokenizer = Tokens()
    grammars = Grammars(tokenizer, tokenizer.eos_ids, 303)

    def whole(structure: Structure, tokens: list[int]) -> bool:
        ended = [*tokens, *tokenizer.eos_ids]
        return grammars.compile(structure).matcher().fits(ended) == len(ended)

    yield whole
    grammars.close()


def test_a_thought_may_be_cut_inside_of_a_character(
    chat_of: ChatOf, fits: Callable[[Structure, list[int]], bool]
) -> None:
    half = list("\N{GRINNING FACE}".encode()[:2])
    answer = [END, 10, 10, *b"yes"]
    optional = Structure("choice", '["yes"]', "choice", rendered(chat_of(QWEN)).frame)
    assert fits(optional, [THINK, *half, 10, *answer])
    assert fits(optional, [10, THINK, *answer])  # as of GLM-4.5, a line before the thought
    assert fits(optional, list(b"yes"))
    assert not fits(optional, [THINK, *half, *b"yes"])
    begun = Structure("choice", '["yes"]', "choice", rendered(chat_of(OPENED)).frame)
    assert fits(begun, [*half, 10, *answer])
    assert not fits(begun, list(b"yes"))


def test_marks_of_calls_in_a_thought_begin_none(
    chat_of: ChatOf, fits: Callable[[Structure, list[int]], bool]
) -> None:
    chat = chat_of(QWEN + "{{ tools }}{{ '' if true else '<tool_call>' }}", Calls())
    tools = tools_of([{"name": "f", "strict": True}], Choice(), True, str)
    structure = chat.render(ASKED, tools=tools).structure
    assert structure
    call = b'\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert fits(structure, [THINK, *b"I may <tool_call> f", END, *b"Or not."])
    assert fits(structure, [THINK, *b"f", END, 302, *call])
    assert not fits(structure, [THINK, *b"f", END, 302, *b"f"])
