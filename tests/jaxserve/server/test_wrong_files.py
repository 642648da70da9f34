"""Files that serve can open but not use are refused before any step is compiled.

openvinotoolkit/model_server#3285: a warning at the start, and then no conversation was answered;
vllm-project/vllm#35151: base models without a template.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jaxserve import loaded_llm, serve
from jaxserve.chat import chat
from jaxserve.chat.renderer import TemplateRenderer
from jaxserve.server import program
from jaxserve.server.model_steps import ModelSteps
from tests.jaxserve.client.test_connection import signed

pytestmark = pytest.mark.system
BUNDLED = Path(__file__).parents[3] / "checkpoints" / "bundled" / "tiny-chat"
DECODE = ("--role", "decode", "--prefill-server", "a:1")
SMALL = ("--max-batch", "2", "--step-tokens", "64", "--max-context", "512", "--port", "0")
TURN = "{% for m in messages %}{{ m.content }}{% endfor %}"
needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the openssl program"
)


class Compiled(BaseException):
    """The checks are over and the steps would be compiled now."""


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run serve in this process and return its line of error."""

    def compile(*_: object) -> None:
        raise Compiled

    monkeypatch.setattr(ModelSteps, "compile", compile)
    monkeypatch.setattr(serve, "configure", lambda *_: None)  # of the log
    monkeypatch.setattr(program, "use_compilation_cache", lambda _: None)

    def run(*flags: object) -> str:
        code = serve.main([*map(str, flags), *SMALL, "--http-port", "0"])
        assert code == 2
        (line,) = (each for each in capsys.readouterr().err.splitlines() if "error: " in each)
        return line

    return run


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where weights are read."""

    def load(*_: object) -> None:
        raise Compiled

    monkeypatch.setattr(loaded_llm, "load", load)


TEMPLATES = [
    (b"{% if %}", "the chat template is no valid Jinja (line 1: Expected an expression"),
    (b"\xff\xfe", "is not UTF-8 text (byte 0: invalid start byte)"),
    (b"a" * 300_000, "the limit is 262144"),
    (b"", "the chat template does not write what a user says"),
    (b'{"chat_template": "a JSON file"}', "the chat template does not write what a user says"),
    (b"{{ messages[0].nothing.more }}", "the chat template failed: "),
    (b"{{ messages | nothing }}", "the chat template is no valid Jinja (line 1: No filter"),
    (b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "stopped"),
]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(("source", "problem"), TEMPLATES, ids=[p for _, p in TEMPLATES])
def test_a_template(
    refusal: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    source: bytes,
    problem: str,
) -> None:
    if problem == "stopped":  # after less than the five seconds of each conversation that is tried
        monkeypatch.setattr(chat, "TemplateRenderer", lambda _: TemplateRenderer(0.1))
    file = tmp_path / "given.jinja"
    file.write_bytes(source)
    line = refusal("--chat-template", file)
    assert f"--chat-template is {file}; " in line or f"--chat-template: {file}" in line
    assert problem in line


@pytest.mark.parametrize(
    "source",
    [
        TURN,
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{{ messages[0].content }}{{ messages[1].content }}",
        "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + TURN,
        "{{ raise_exception('documents are missing') }}",
    ],
)
def test_a_template_for_some_conversations(
    refusal: Callable[..., str], tmp_path: Path, source: str
) -> None:
    file = tmp_path / "given.jinja"
    file.write_text(source)
    with pytest.raises(Compiled):
        refusal("--chat-template", file)


@pytest.mark.usefixtures("no_weights")
def test_a_parser_of_calls_for_a_template_without_tools(
    refusal: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "given.jinja"
    file.write_text(TURN)
    line = refusal("--chat-template", file, "--tool-parser", "hermes")
    assert "--tool-parser is hermes; the chat template takes no tools" in line


def copied(tmp_path: Path, template: Any) -> Path:
    """Copy the bundled model with another template; None for none."""
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    settings.pop("chat_template", None)
    if template is not None:
        settings["chat_template"] = template
    config.write_text(json.dumps(settings), encoding="utf-8")
    return folder


def test_the_template_of_a_folder(refusal: Callable[..., str], tmp_path: Path) -> None:
    folder = copied(tmp_path, "{% if %}")
    line = refusal(folder)
    assert f"{folder}: the chat template is no valid Jinja" in line
    assert line.endswith("(--chat-template FILE gives another)")


def test_the_template_for_tools(refusal: Callable[..., str], tmp_path: Path) -> None:
    named = [{"name": "default", "template": TURN}, {"name": "tool_use", "template": "{% for %}"}]
    folder = copied(tmp_path, named)
    assert f"{folder}: the chat template is no valid Jinja" in refusal(folder)


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (
            (),
            [
                "sampling temperature 0.6, top_p 0.95 where a request says nothing "
                "(generation_config.json)",
                "sampling not followed, of generation_config.json: num_beams",
            ],
        ),
        (("--generation-config", "none"), []),
    ],
)
def test_sampling_defaults_are_said(
    refusal: Callable[..., str],
    tmp_path: Path,
    flags: tuple[str, ...],
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copied(tmp_path, TURN)
    fields = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "num_beams": 2}
    (folder / "generation_config.json").write_text(json.dumps(fields))
    with pytest.raises(Compiled):
        refusal(folder, *flags)
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("sampling")] == lines


def test_a_sampling_default_out_of_bounds(refusal: Callable[..., str], tmp_path: Path) -> None:
    folder = copied(tmp_path, TURN)
    (folder / "generation_config.json").write_text('{"temperature": 3}')
    line = refusal(folder)
    assert "generation_config.json: temperature is 3" in line and "--generation-config none" in line


def test_a_parser_of_calls_without_a_template(refusal: Callable[..., str], tmp_path: Path) -> None:
    line = refusal(copied(tmp_path, None), "--tool-parser", "llama")
    assert "--tool-parser is llama; " in line and "has no chat template" in line


@pytest.mark.parametrize(
    ("template", "note"),
    [
        (None, "has no chat template; give one with --chat-template FILE; until then,"),
        ("{{ raise_exception('no') }}", "message fails: the chat template refuses: no"),
        ("{{ query }}", "fails: the chat template does not write what a user says"),
        ("{{ messages[1].content }}", "fails: the chat template failed: "),
        ("{% for d in documents %}{% endfor %}", "'NoneType' object is not iterable"),
        ([{"name": "tool_use", "template": "x"}], "none of the chat templates ['tool_use'] is"),
        ("{{ tools }}" + TURN, "(--tool-parser names it): requests with tools are refused"),
    ],
)
def test_what_some_conversations_meet_is_said(
    refusal: Callable[..., str],
    tmp_path: Path,
    template: str | None,
    note: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(Compiled):
        refusal(copied(tmp_path, template))
    (said,) = (
        line for line in capsys.readouterr().err.splitlines() if line.startswith("chat     ")
    )
    assert note in said


@needs_openssl
@pytest.mark.usefixtures("no_weights")
def test_certificates(refusal: Callable[..., str], tmp_path: Path) -> None:
    (cert, key), (_, other) = signed(tmp_path, "one"), signed(tmp_path, "two")
    wrong = tmp_path / "wrong"
    wrong.write_text("no certificate")
    for flag, flags, problem in (
        ("--tls-cert", ("--tls-key", key), "it holds no certificate in PEM"),
        ("--tls-key", ("--tls-cert", cert), "it holds no private key in PEM"),
        ("--tls-client-ca", ("--tls-cert", cert, "--tls-key", key), "no certificate in PEM"),
        ("--prefill-tls-ca", DECODE, "it holds no certificate in PEM"),
    ):
        line = refusal(flag, wrong, *flags)
        assert f"{flag} is {wrong}; " in line and problem in line
    assert "is not the key of" in refusal("--tls-cert", cert, "--tls-key", other)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("flag", ["--token-file", "--admin-token-file", "--prefill-token-file"])
def test_tokens(refusal: Callable[..., str], tmp_path: Path, flag: str) -> None:
    file = tmp_path / "token"
    run = partial(refusal, *(DECODE if "prefill" in flag else ()))
    for text in ("", "two words", "\N{SNOWMAN}", "x" * 5000):
        file.write_text(text, encoding="utf-8")
        assert f"{flag} is {file}; line 1 holds no token" in run(flag, file)


@pytest.mark.usefixtures("no_weights")
def test_other_places(refusal: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "servers").write_text("a:1\nhttp://b:2\n")
    for flags, problem in (
        (["--bundle", "/nowhere"], "--bundle is /nowhere; "),
        (["--bundle", tmp_path], f"--bundle is {tmp_path}; "),
        (
            ["--role", "decode", "--prefill-servers-file", tmp_path / "servers"],
            "line 2 is 'http://b:2'; it must be HOST:PORT",
        ),
    ):
        assert problem in refusal(*flags)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere", "is /nowhere; it cannot be read (--otel)"),
        ("OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", "/nowhere", "is /nowhere; it cannot be read"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/", "is /; it cannot be read (--otel)"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "--otel: a variable OTEL_* has a value of"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "--otel: a variable OTEL_* has a value of another"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1", "a value of another form: Invalid IPv6"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier", "is 'carrier'; --otel knows grpc and"),
    ],
)
def test_variables_of_traces(
    refusal: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    problem: str,
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    monkeypatch.setenv(variable, value)
    assert problem in refusal("--otel")
