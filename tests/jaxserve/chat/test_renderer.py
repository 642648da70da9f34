"""Chat templates: the published renderings, and templates that try to escape, to run for ever, or
to eat the memory.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.chat import renderer as module
from jaxserve.chat.renderer import TemplateRenderer
from jaxserve.errors import ChatError
from tests.slow_cases import slow_but

pytestmark = pytest.mark.system
SECONDS = 0.1  # of processor time; the kernel allows up to two more
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}{{ raise_exception('empty') }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ lipsum.__globals__['os'].popen('true').read() }}",
    "{{ '{0.__class__.__mro__}'.format('')[0].x.y }}",
    "{{ raise_exception.__globals__.sys.modules }}",
    "{% set ns = namespace() %}{{ ns.__class__.__init__.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ messages.append(1) }}",
    "{{ open('/etc/passwd').read() }}",
    "{{ self.__init__.__globals__ }}",
]
ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% for i in range(99999) %}{{ m(n) }}{% endfor %}{% endmacro %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = m %}{% endfor %}{% endfor %}",
    "{{ 7 ** 99999999 % 2 }}",
    "{% set ns = namespace(x='x') %}{% for i in range(99999) %}{% set ns.x = (ns.x * "
    "2)[:9999999] %}{% endfor %}",
]
TOO_MUCH = {
    "{{ 'x' * 10**9 }}": "too much memory",
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% "
    "endfor %}": "memory",
    "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}": "writes more than",
    "{{ 'é' * 9000000 }}": "writes more than",
    "{{ range(10**9)|list|length }}": "Range too big",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "recurses without end",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "nested too deep",
    "{% for x in y %}": "no valid Jinja (line 1: Unexpected end of template",
    "{{ 1 / 0 }}": "division by zero",
    "{{ undefined.attribute }}": "'undefined' is undefined",
    "{{ '\\ud800' }}": "surrogates not allowed",
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    """Yield a renderer that has a minute on the clock."""
    renderer = TemplateRenderer(SECONDS)
    renderer._process._seconds = 60.0
    yield renderer
    renderer.close()


def golden(data_folder: Path) -> list[dict]:
    lines = (
        (data_folder / "chat_templates" / "tgi_golden.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    return [json.loads(line) for line in lines]


def test_published_renderings(renderer: TemplateRenderer, data_folder: Path) -> None:
    cases = golden(data_folder)
    assert len(cases) == 28
    for case in cases:
        template = case["template"]
        if case["template_lines_trimmed_and_joined_before_rendering"]:
            template = "".join(line.strip() for line in template.splitlines())
        names = ("messages", "bos_token", "eos_token", "add_generation_prompt")
        assert (
            renderer.render(template, {name: case[name] for name in names}) == case["expected"]
        ), case["name"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),  # trim_blocks, lstrip_blocks
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}"
         "{% if i == 3 %}{% break %}{% endif %}{% endfor %}", "023"),
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, indent=1, sort_keys=true) }}",
         '{\n "a": "\\u00e9",\n "b": 1\n}'),
        ("{{ '\ufdd0é' | tojson(ensure_ascii=true) }}", '"\ufdd0\\u00e9"'),
        ("a{% generation %}{{ 'b' }}{% endgeneration %}c", "abc"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ unknown }}{% if unknown is defined %}x{% endif %}", ""),
        ("{{ messages[0]['role'] | title }}", "User"),
    ],
)  # fmt: skip
def test_the_environment_is_the_one_templates_are_written_for(
    renderer: TemplateRenderer, template: str, expected: str
) -> None:
    assert renderer.render(template, {"messages": [{"role": "user", "content": ""}]}) == expected


def still_renders(renderer: TemplateRenderer) -> bool:
    return renderer.render("{{ x }}", {"x": "fine"}) == "fine"


@pytest.mark.parametrize("template", ESCAPES)
def test_escape_is_refused(renderer: TemplateRenderer, template: str) -> None:
    with pytest.raises(ChatError) as caught:
        renderer.render(template, {"messages": []})
    assert "\n" not in str(caught.value) and "stopped" not in str(caught.value)
    assert still_renders(renderer)


@pytest.mark.parametrize("template", slow_but(ENDLESS, (ENDLESS[0], ENDLESS[2])))
def test_endless_template_is_stopped(renderer: TemplateRenderer, template: str) -> None:
    with pytest.raises(ChatError, match=r"was stopped: it crashed, or took longer than 0\.1 s"):
        renderer.render(template, {})
    assert still_renders(renderer)


def test_a_process_that_takes_no_processor_time_is_stopped_by_the_clock() -> None:
    hasty = TemplateRenderer(SECONDS)
    os.kill(hasty._process._running().pid, signal.SIGSTOP)
    with pytest.raises(ChatError, match=r"was stopped: it crashed, or took longer than 0\.1 s"):
        hasty.render("", {})
    hasty.close()


@pytest.mark.parametrize(("template", "message"), TOO_MUCH.items(), ids=range(len(TOO_MUCH)))
def test_template_that_fails_says_why(template: str, message: str) -> None:
    patient = TemplateRenderer(60)  # these are bounded by other things than time
    with pytest.raises(ChatError) as caught:
        patient.render(template, {})
    assert (
        message in str(caught.value)
        and "\n" not in str(caught.value)
        and len(str(caught.value)) < 600
    )
    assert still_renders(patient)
    patient.close()


def test_what_the_template_says_reaches_the_client(renderer: TemplateRenderer) -> None:
    with pytest.raises(
        ChatError, match=r"^messages: the chat template refuses: roles must alternate!$"
    ):
        renderer.render("{{ raise_exception('roles\nmust  alternate!') }}", {})


def test_bounds_of_what_is_sent(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ChatError, match="the chat template has more than 262144 bytes"):
        renderer.render("é" * 131073, {})
    monkeypatch.setattr(module, "MAX_REQUEST_BYTES", 100)
    with pytest.raises(
        ChatError, match=r"the conversation has [0-9]+ bytes as JSON; the limit is 100"
    ):
        renderer.render("", {"x": "x" * 100})


def test_a_long_conversation_is_rendered(renderer: TemplateRenderer) -> None:
    text = "wörd " * 200_000
    assert renderer.render("{{ x }}{{ x }}", {"x": text}) == text + text


def test_strings_of_a_template(renderer: TemplateRenderer) -> None:
    look = renderer.look(
        "{% if message.role in ['user', 'x'] and '</think>' in c %}{{ c.split('</t>')[-1] + "
        "'<|user|>' }}{% endif %}"
        "{{ m('arg') | replace('a', 'b') }}literal"
    )
    assert look.attributes == {"role", "split"}
    assert look.variables == {"message", "c", "m"}
    assert look.words == {
        "user",
        "x",
        "</think>",
        "</t>",
        "<|user|>",
        "arg",
        "a",
        "b",
    }
    assert look.sought == {"user", "x", "</think>", "</t>"}


def test_a_process_that_dies_is_replaced(renderer: TemplateRenderer) -> None:
    assert still_renders(renderer)
    process = renderer._process._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert still_renders(renderer)
    assert renderer._process._process is not process


def test_a_process_that_dies_at_work_is_an_error_and_replaced(renderer: TemplateRenderer) -> None:
    assert still_renders(renderer)
    assert renderer._process._process is not None
    killer = threading.Timer(0.2, renderer._process._process.kill)
    killer.start()
    with pytest.raises(ChatError, match="it crashed"):
        renderer.render(ENDLESS[0], {})
    killer.join()
    assert still_renders(renderer)


def test_several_threads(renderer: TemplateRenderer) -> None:
    """Answers reach who asked, while one of the templates is stopped."""
    results: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        results[number] = [renderer.render("{{ x }}", {"x": f"{number}-{i}"}) for i in range(30)]

    def ask_for_trouble() -> None:
        with pytest.raises(ChatError):
            renderer.render(ENDLESS[0], {})
        results[-1] = []

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)] + [
        threading.Thread(target=ask_for_trouble)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {-1: []} | {n: [f"{n}-{i}" for i in range(30)] for n in range(4)}


def test_the_process_ends_with_its_parent() -> None:
    """Idle it sees the end of its input; at work the processor time that the kernel allows it runs
    out.
    """
    script = (
        "import os, sys, threading\n"
        "from jaxserve.chat.renderer import TemplateRenderer\n"
        f"renderer = TemplateRenderer({SECONDS})\n"
        "renderer._process._seconds = 60\n"
        "renderer.render('', {})\n"
        "print(renderer._process._process.pid, flush=True)\n"
        "if sys.argv[1:]: threading.Timer(0.3, os._exit, [0]).start(); "
        "renderer.render(sys.argv[1], {})\n"
        "os._exit(0)\n"
    )
    root = Path(__file__).parents[3]
    for arguments in ([], [ENDLESS[0]]):
        run = [sys.executable, "-c", script, *arguments]
        done = subprocess.run(run, cwd=root, capture_output=True, text=True, check=True)
        ends = time.monotonic() + 60
        while Path(f"/proc/{int(done.stdout)}").exists() and not is_zombie(int(done.stdout)):
            assert time.monotonic() < ends, "it outlives whoever started it"
            time.sleep(0.05)


def is_zombie(process: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return True


def test_the_process_imports_nothing_of_ours_and_no_jax() -> None:
    script = f"import runpy, sys; runpy.run_path({str(module.WORKER)!r}); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "jinja2" in loaded and not loaded & {"jax", "jaxserve", "numpy", "tokenizers"}
