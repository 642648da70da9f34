"""The command line, called as a person would; what it cannot do is one line on standard error and
exit code 2.
"""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve.cli.output import TextPrinter
from jaxserve.completion import Delta
from jaxserve.engine.trace import DEVICES
from jaxserve.generate.flags import parse
from tests.compiled_steps import compiled_steps_folder
from tests.jaxserve.generate_harness import (
    BUNDLED,
    ROOT,
    SMALL,
    STORY,
    Call,
    assert_refused,
    caller,
    copied,
)


def on_a_terminal(text: str, prompts: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what a terminal gets of a completion's text."""
    file = io.StringIO()
    monkeypatch.setattr("sys.stdout", file)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    TextPrinter(alone=True, prompts=prompts).show(0, Delta(0, 0, text, ()))
    return file.getvalue()


def test_on_a_terminal_a_prompt_stands_dimmed_before_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = "Once [upon] a time\n" * 20
    shown = on_a_terminal(" there was", [prompt], monkeypatch)
    assert shown.replace("\x1b[2m", "").replace("\x1b[0m", "") == f"{prompt} there was"
    assert "\x1b[2mOnce [upon] a time" in shown
    assert on_a_terminal(" there was", [], monkeypatch) == " there was"


def test_elsewhere_text_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    TextPrinter(alone=True, prompts=[STORY]).show(0, Delta(0, 0, " there was", ()))
    assert capsys.readouterr().out == " there was"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    return caller(capsys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copied(tmp_path)


def test_text_streams_to_standard_output(call) -> None:
    code, out, err = call("--prompt", STORY, "--max-tokens", "12", "--temperature", "0")
    assert code == 0 and out.endswith("\n") and out.count("\n") == 1
    for figure in ("tokens in", "12 out", "TTFT", "ms per token", "tokens/s", "cached"):
        assert figure in err.replace("\n", " ")
    assert err.splitlines()[0] == "tiny-chat-draft  0.4 M  bfloat16  1 MiB  cpu"
    assert "padding" not in err and "attention" not in err


def test_a_trace_is_written(call, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    flags = ["--prompt", STORY, "--max-tokens", "9", "--temperature", "0"]
    code, out, _ = call(*flags, "--trace", str(file))
    assert (code, out) == call(*flags)[:2]
    events = json.loads(file.read_text())["traceEvents"]
    steps = [event for event in events if event["pid"] == DEVICES and event["ph"] == "X"]
    assert steps[0]["name"] == "prefill" and sum(s["args"]["tokens"] for s in steps) >= 5 + 8
    refused = call(*flags, "--trace", str(tmp_path / "nowhere" / "trace.json"))
    assert refused[0] == 2 and "no file can be written there" in refused[2]


def test_details_are_asked_for(call) -> None:
    _, _, err = call("--prompt", STORY, "--max-tokens", "2", "-v")
    assert "padding" in err and "on each device: embedding" in err.replace("\n", " ")


def test_json_is_one_object_per_completion_and_nothing_else(call) -> None:
    flags = ["--json", "--n", "2", "--seed", "3", "--max-tokens", "5", "--logprobs", "1"]
    code, out, _ = call("--prompt", STORY, "--prompt", "The dog", *flags)
    objects = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(o["prompt"], o["index"]) for o in objects] == [
        (STORY, 0),
        (STORY, 1),
        ("The dog", 0),
        ("The dog", 1),
    ]
    for o in objects:
        expected = {
            "prompt",
            "prompt_token_ids",
            "text",
            "token_ids",
            "logprobs",
            "finish_reason",
            "timings",
        }
        assert expected <= set(o) and len(o["logprobs"]) == len(o["token_ids"]) <= 5
        counts = {
            "cached_tokens",
            "verifications",
            "drafted_tokens",
            "accepted_tokens",
            "preemptions",
        }
        assert {"queue", "ttft", "tpot", "total"} | counts == set(o["timings"])
        assert {"token", "token_id", "logprob", "top"} == set(o["logprobs"][0])


def test_prompts_file_and_standard_input(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(f"\ufeff{STORY}\r\n\r\nThe dog\r\n".encode())
    greedy = ["--temperature", "0", "--max-tokens", "6", "--json"]
    _, from_file, _ = call("--prompts-file", str(file), *greedy)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The dog\n"), encoding="ascii"))
    _, from_stdin, _ = call(*greedy)
    done = [json.loads(line) for line in (from_file + from_stdin).splitlines()]
    assert [(c["prompt_index"], c["prompt"]) for c in done] == [
        (0, STORY),
        (1, "The dog"),
        (0, "The dog"),
    ]
    assert done[1]["token_ids"] == done[2]["token_ids"]


def test_several_prompts_are_printed_in_order(call) -> None:
    _, out, _ = call(
        "--prompt", STORY, "--prompt", "The dog", "--max-tokens", "3", "--temperature", "0"
    )
    lines = out.splitlines()
    assert lines[0] == "--- prompt 1, choice 1" and "--- prompt 2, choice 1" in lines


def test_deterministic_and_float32(call) -> None:
    flags = ["--deterministic", "--dtype", "float32", "--seed", "9", "--max-tokens", "8", "--json"]
    alone = json.loads(call("--prompt", STORY, *flags)[1])
    among = [
        json.loads(line)
        for line in call("--prompt", "The dog", "--prompt", STORY, *flags)[1].splitlines()
    ]
    assert among[1]["token_ids"] == alone["token_ids"] and among[1]["text"] == alone["text"]


def test_pages_of_8_bits(call) -> None:
    """Other log-probabilities, but near ones."""
    flags = [
        "--dtype",
        "float32",
        "--temperature",
        "0",
        "--max-tokens",
        "1",
        "--prompt-logprobs",
        "0",
        "--json",
    ]
    whole, rounded = (
        json.loads(call("--prompt", STORY, *flags, "--kv", each)[1]) for each in ("auto", "int8")
    )
    scores = [[entry["logprob"] for entry in told["prompt_logprobs"]] for told in (whole, rounded)]
    assert scores[0] != scores[1]
    assert scores[0] == pytest.approx(scores[1], abs=0.3)


def test_quantized_weights(call) -> None:
    """On two devices the tokens of the model as it is, from which int8 hardly differs."""
    flags = [
        "--prompt",
        STORY,
        "--dtype",
        "float32",
        "--temperature",
        "0",
        "--max-tokens",
        "8",
        "--json",
    ]
    whole = json.loads(call(*flags)[1])["token_ids"]
    two = json.loads(call(*flags, "--weights", "int8", "--tensor", "2")[1])["token_ids"]
    assert two == whole


@pytest.fixture
def chat(call, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """call() for a conversation, with a template that the bundled model has no opinion of."""
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ bos_token + m.role + ':' + m.content + eos_token }}{% endfor "
        "%}{{ bos_token }}"
    )
    flags = ["--chat", "--chat-template", str(template), "--temperature", "0", "--max-tokens", "8"]
    return lambda *arguments: call(*flags, *arguments)


def test_marks_of_the_template_that_are_text_are_named(call, tmp_path: Path) -> None:
    template = tmp_path / "inst.jinja"
    template.write_text("[INST] {{ messages[0].content }} [/INST]")
    code, _, err = call("--chat", "--chat-template", str(template), "--prompt", STORY)
    assert code == 0
    assert "'[/INST]', '[INST]', which are no tokens of this tokenizer but text" in err


class Terminal(io.StringIO):
    """Somebody types these lines, and Ctrl-C where one is that."""

    def isatty(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> str:
        line = super().readline(-1)
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


def turns_of(out: str) -> list[tuple[str, str]]:
    """Prompt and answer of each JSON line."""
    return [(done["prompt"], done["text"]) for done in map(json.loads, out.splitlines())]


@pytest.mark.system
def test_chat_keeps_its_history(chat) -> None:
    system = "You are a kind and patient bear, and you like to tell long stories."
    code, out, err = chat(
        "--prompt", "Hello", "--prompt", "And </s> then?", "--system", system, "--json"
    )
    (first, answer), (second, _) = turns_of(out)
    assert code == 0 and answer
    assert first == f"<s>system:{system}</s><s>user:Hello</s><s>"
    assert second == first + f"assistant:{answer}</s><s>user:And </s> then?</s><s>"
    numbers = [
        (done["prompt_index"], done["timings"]["cached_tokens"])
        for done in map(json.loads, out.splitlines())
    ]
    assert numbers[0] == (0, 0) and numbers[1][0] == 1 and numbers[1][1] >= 16
    assert f"{numbers[1][1]} cached" in err.replace("\n", " ")
    assert chat("--prompt", "Hello", "--system", system)[1] == answer + "\n"


def test_chat_without_a_template(call, folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    assert_refused(
        call("--chat", "--prompt", STORY, model=folder),
        "has no chat template; give one with --chat-template",
    )


@pytest.mark.system
def test_chat_from_standard_input(chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = "Hello\r\n\ncafé\n /reset\nAgain"
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), encoding="ascii")
    )
    code, piped, _ = chat("--json")
    prompts = [prompt for prompt, _ in turns_of(piped)]
    assert code == 0 and len(prompts) == 3
    assert prompts[1].startswith(prompts[0]) and prompts[1].endswith("user:café</s><s>")
    assert prompts[2] == "<s>user:Again</s><s>"
    (tmp_path / "turns").write_text(lines)
    from_file = chat("--json", "--prompts-file", str(tmp_path / "turns"))[1]
    assert turns_of(from_file) == turns_of(piped)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\ncaf\xe9\n")))
    code, out, err = chat()
    assert code == 2 and out and "error: standard input is not UTF-8 text in line 2 (byte 3:" in err


@pytest.mark.system
def test_chat_at_a_terminal(chat, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        text for _, text in turns_of(chat("--json", "--prompt", "Hello", "--prompt", "More")[1])
    ]
    monkeypatch.setattr(sys, "stdin", Terminal("Hello\n\n^C\nMore\n/reset\nHello\n"))
    code, out, err = chat()
    assert code == 0 and out == f"> {answers[0]}\n> > > {answers[1]}\n> > {answers[0]}\n> "
    assert "Ctrl-D" in err and "cached" in err


@pytest.mark.system
def test_ctrl_c_ends_the_answer_only(chat, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, answer), (_, second) = turns_of(chat("--json", "--prompt", "Hello", "--prompt", "Hello")[1])
    shown: list[str] = []
    show = TextPrinter.show

    def interrupted(printer: TextPrinter, number: int, delta: Delta) -> None:
        show(printer, number, delta)
        shown.append(delta.text)
        if len(shown) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TextPrinter, "show", interrupted)
    monkeypatch.setattr(sys, "stdin", Terminal("Hello\n/reset\nHello\nHello\n"))
    before = signal.getsignal(signal.SIGINT)
    code, out, _ = chat()
    cut = "".join(shown[:3])
    assert code == 0 and answer.startswith(cut) and cut != answer
    assert out == f"> {cut}\n> > {answer}\n> {second}\n> "
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.system
def test_a_turn_without_an_answer_is_forgotten(chat) -> None:
    limits = ["--max-context", "64", "--json"]
    code, out, err = chat(
        "--prompt", "Hello", "--prompt", "word " * 80, "--prompt", "Hello", *limits
    )
    (first, answer), (third, _) = turns_of(out)
    assert code == 2 and "error: messages: " in err
    assert third == first + f"assistant:{answer}</s><s>user:Hello</s><s>"


def test_the_bundled_model_is_the_default() -> None:
    assert parse([]).model == ROOT / "jaxserve" / "checkpoints" / "bundled" / "tiny-chat"


def test_an_empty_prompt_is_bos_or_an_error(call, folder: Path) -> None:
    code, out, _ = call("--prompt", "", "--max-tokens", "3", "--json")
    assert code == 0 and len(json.loads(out)["prompt_token_ids"]) == 1
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert_refused(call("--prompt", "", model=folder), "has no tokens")


def test_one_bad_prompt_does_not_disturb_the_others(call) -> None:
    greedy = ["--temperature", "0", "--max-tokens", "6", "--max-context", "64", "--json"]
    good = call("--prompt", STORY, "--prompt", "The dog", *greedy)
    mixed = call("--prompt", STORY, "--prompt", "word " * 200, "--prompt", "The dog", *greedy)
    assert good[0] == 0 and mixed[0] == 2
    ids = [
        [json.loads(line)["token_ids"] for line in out.splitlines()] for out in (good[1], mixed[1])
    ]
    assert ids[0] == ids[1]
    assert "error: prompt 2: " in mixed[2]
    assert [json.loads(line)["prompt_index"] for line in mixed[1].splitlines()] == [0, 2]


def test_standard_input_that_cannot_be_read(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    for flags in ([], ["--chat"]):
        assert_refused(call(*flags), "there is no standard input to read one from")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    assert_refused(call(), "standard input is not UTF-8 text (byte 3:")


def test_a_prompts_file_that_is_not_text(call, tmp_path: Path) -> None:
    (tmp_path / "latin1").write_bytes("caf\u00e9".encode("latin-1"))
    assert_refused(
        call("--prompts-file", str(tmp_path / "latin1")), "latin1; it is not UTF-8 text (byte 3:"
    )
    assert_refused(call("--prompts-file", str(tmp_path)), "Is a directory")


@pytest.mark.system
def test_a_reader_that_goes_away_ends_the_run_quietly() -> None:
    flags = ["--prompt", STORY, "--n", "4", "--json", "--max-tokens", "9"]
    pipe = subprocess.PIPE
    with subprocess.Popen(program(*flags), cwd=ROOT, stdout=pipe, stderr=pipe) as running:
        assert running.stdout and running.stderr
        running.stdout.close()
        assert running.stderr.read().count(b"\n") == 1, "what weights take"
        assert running.wait() == 141


@pytest.mark.slow
@pytest.mark.system
def test_without_a_home_steps_are_compiled_but_not_kept() -> None:
    env = {**os.environ, "XDG_CACHE_HOME": "", "HOME": "/dev/null"}
    done = subprocess.run(
        program("--prompt", STORY, "--max-tokens", "2"), cwd=ROOT, env=env, capture_output=True
    )
    assert done.returncode == 0 and done.stdout
    assert done.stderr.startswith(
        b"compiled steps are not kept: /dev/null/.cache/jaxserve/xla: Not a directory"
    )
    assert done.stderr.count(b"are not kept") == 1


@pytest.mark.system
def test_json_is_utf8_whatever_the_terminal_speaks() -> None:
    env = os.environ | {
        "PYTHONIOENCODING": "ascii",
        "JAX_COMPILATION_CACHE_DIR": str(compiled_steps_folder()),
    }
    for flags, expected in ((["--json"], "caf\u00e9".encode()), ([], b"caf?")):
        run = program("--prompt", "caf\u00e9", "--echo", "--max-tokens", "2", *flags)
        done = subprocess.run(run, cwd=ROOT, env=env, capture_output=True)
        assert done.returncode == 0 and expected in done.stdout


def program(*flags: str) -> list[str]:
    return [sys.executable, "-m", "jaxserve.generate", "--model", str(BUNDLED), *SMALL, *flags]


@pytest.mark.system
def test_as_a_program() -> None:
    """The module runs as its docstring says, from any folder."""
    run = program("--prompt", STORY, "--max-tokens", "5", "--json")
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finish_reason"] in ("length", "stop")


def test_babyllama_tells_its_story(data_folder: Path, call) -> None:
    """A real checkpoint: the published story, and transformers' greedy tokens for 200 steps."""
    golden = json.loads((ROOT / "tests" / "golden" / "babyllama_greedy.json").read_text())
    flags = ["--prompt", "", "--temperature", "0", "--max-tokens", "200", "--ignore-eos", "--json"]
    code, out, _ = call(*flags, model=data_folder / "models" / "babyllama")
    done = json.loads(out)
    story = (
        "Once upon a time, there was a little girl named Lily. She loved to play outside in "
        "the sunshine."
    )
    assert code == 0 and done["text"].startswith(story)
    assert done["token_ids"] == golden["tokens"]
