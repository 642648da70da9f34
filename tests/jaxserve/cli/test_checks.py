"""Wrong arguments are refused before jax is imported: here it cannot be."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from jaxserve.checkpoints import orbax_store
from jaxserve.cli.checks import check_file
from jaxserve.config.options import ATTENTION_KERNELS, KERNELS
from jaxserve.generate.__main__ import main
from jaxserve.generate.flags import parse
from jaxserve.loading.load_plan import DTYPES
from jaxserve.models.precision import AS_STORED, DTYPE_NAMES, FORMS
from jaxserve.models.quant import SCHEMES
from jaxserve.pallas_kernels import dispatch
from jaxserve.programs import PROGRAMS

ROOT = Path(__file__).parents[3]
BUNDLED = str(ROOT / "checkpoints" / "bundled" / "tiny-chat")
NO_FOLDER = "/nowhere: there is no such folder"
TARGET = "--target grpc://127.0.0.1:1"


def of_bench(command: str) -> list[tuple[str, str]]:
    """Return wrong places of a server's benchmark, and what is said about each."""
    return [
        (f"{command} --target a:1", "--target is a:1; it must be grpc://HOST:PORT or http://HOST"),
        (f"{command} --target grpc://a", "--target is a; it must be HOST:PORT"),
        (
            f"{command} {TARGET} --tokenizer /nowhere",
            "/nowhere has none of tokenizer.json, tekken.json",
        ),
        (
            f"{command} {TARGET} --token-file /nowhere",
            "--token-file is /nowhere; it cannot be read: No such file",
        ),
        (
            f"{command} {TARGET} --prompts-file /nowhere",
            "--prompts-file is /nowhere; it cannot be read: No such file",
        ),
        (
            f"{command} {TARGET} --tls-ca /nowhere",
            "TLS ca is /nowhere; it cannot be read: No such file",
        ),
        (
            f"{command} {TARGET} --tls-ca README.md",
            "TLS ca is README.md; it holds no certificate in PEM",
        ),
        (f"{command} {TARGET} --tls-cert /nowhere", "a TLS certificate goes with its key"),
        (
            f"{command} {TARGET} --tls-cert /nowhere --tls-key /nowhere",
            "TLS certificate is /nowhere; it cannot",
        ),
    ]


def of_engine(command: str) -> list[tuple[str, str]]:
    """Return wrong flags of an engine that a benchmark loads, and what is said about each."""
    return [
        (f"{command} --dtype half", "--dtype is half; choose auto, float32 or bfloat16"),
        (f"{command} --weights awq", "--weights is awq; choose auto, int8"),
        (f"{command} --product x", "--product is x; "),
        (f"{command} --data 0", "--data is 0; it must be at least 1"),
        (f"{command} --expert 0", "--expert is 0; it must be at least 1"),
        (f"{command} --tensor 0", "--tensor is 0; it must be at least 1"),
        (f"{command} --max-batch 0", "--max-batch is 0; it must be between 1 and 4096"),
        (f"{command} --attention magic", "attention 'magic' is not built in"),
        (f"{command} --speculate draft", "there is no draft model (add --draft-model)"),
    ]


OF_BENCHES = [*of_bench("bench serve --rate 1 --requests 1"), *of_bench("bench overload")]
REFUSED = [
    ("generate /nowhere text", NO_FOLDER),
    ("generate --prompt text --model /nowhere", NO_FOLDER),
    ("generate Once", "Once: there is no such folder; give the folder that holds"),
    (
        f"serve --model {BUNDLED}-draft /nowhere",
        "-draft, and /nowhere is another",
    ),
    (f"serve --model {BUNDLED} /nowhere", "tiny-chat, and /nowhere is another"),
    ("generate --temperature 9", "temperature is 9.0; it must be between 0.0 and 2.0"),
    ("generate --prompt text --dtype half", "--dtype is half; choose auto, float32 or bfloat16"),
    ("generate --prompt text --weights awq", "--weights is awq; choose auto, int8"),
    ("generate --prompt text --attention magic", "attention 'magic' is not built in"),
    ("generate --prompt text --max-batch 0", "--max-batch is 0; it must be between 1 and 4096"),
    ("generate --prompt text --speculate draft", "there is no draft model (add --draft-model)"),
    ("generate --prompt text --tensor 0", "--tensor is 0; it must be at least 1"),
    ("generate --prompt text --hosts 2", "--host-index is missing"),
    (
        "generate --output out --batch-file /nowhere",
        "--batch-file is /nowhere; it cannot be read: No such file",
    ),
    (
        "generate --batch-file README.md --output /nowhere/out",
        "--output is /nowhere/out; no file can be written there",
    ),
    (
        "generate --prompts-file /nowhere",
        "--prompts-file is /nowhere; it cannot be read: No such file",
    ),
    (
        "generate --chat --prompts-file /nowhere",
        "--prompts-file is /nowhere; it cannot be read: No such file",
    ),
    (
        "generate --chat --chat-template /nowhere",
        "--chat-template is /nowhere; it cannot be read: No such",
    ),
    ("generate --prompt text --speculate draft --draft-model /nowhere", NO_FOLDER),
    ("generate --prompt text --trace /nowhere/x", "--trace is /nowhere/x; no file can be written"),
    ("generate --prompt text --json-schema /nowhere", "--json-schema: /nowhere: No such file"),
    ("generate --prompt text --lark /", "--lark: /: Is a directory"),
    (
        "generate --prompt text --hosts 2 --host-index 0 --coordinator a:0",
        "--coordinator is a:0; its port must be 1 to 65535",
    ),
    ("serve /nowhere", NO_FOLDER),
    ("serve --model /nowhere", NO_FOLDER),
    ("serve --token-file /nowhere", "--token-file is /nowhere; it cannot be read: No such file"),
    ("serve --tls-cert / --tls-key /", "--tls-cert is /; it cannot be read: Is a directory"),
    ("serve --tls-cert /nowhere", "--tls-cert and --tls-key go together"),
    ("serve --state-key-file /nowhere", "--state-key-file is /nowhere; it cannot be read: No such"),
    ("serve --admin-token-file /nowhere", "--admin-token-file is /nowhere; it cannot be read: No"),
    ("serve --tls-cert README.md --tls-key /nowhere", "--tls-key is /nowhere; it cannot be read"),
    (
        "serve --tls-cert README.md --tls-key README.md --tls-client-ca /nowhere",
        "--tls-client-ca is /nowhere; it cannot be read",
    ),
    ("serve --chat-template /nowhere", "--chat-template is /nowhere; it cannot be read: No such"),
    ("serve --chat-template /", "--chat-template is /; it cannot be read: Is a directory"),
    ("serve --profile-dir /dev/null", "--profile-dir is /dev/null; no profile can be written"),
    ("serve --speculate draft --draft-model /nowhere", NO_FOLDER),
    ("serve --deterministic --ready-when first", "--ready-when is first; with --deterministic no"),
    ("serve --served-model-name \0", "is not a name that clients can ask for"),
    # Addresses are resolved here, but those of other machines are not: they may come later.
    ("serve --host 198.51.100.7", "--host is 198.51.100.7; it is no address of this machine"),
    ("serve --host 127.0.0.1:80", "--host is 127.0.0.1:80; it is no name or address without a"),
    ("serve --port 65536", "'65536' is not a port: 0 to 65535"),
    ("serve --http-port -1", "'-1' is not a port"),
    ("serve --vllm-port x", "'x' is not a port"),
    ("serve --admin-port 1.5", "'1.5' is not a port"),
    ("serve --control-port 65536", "--control-port is 65536; it must be 0 to 65535"),
    ("generate --prompt text --control-port -1", "--control-port is -1; it must be 0 to 65535"),
    ("serve --hosts 2 --host-index 0 --coordinator a", "--coordinator is a; it must be HOST:PORT"),
    (
        "serve --role decode --prefill-server http://a:1",
        "--prefill-server is http://a:1; it must be HOST:PORT",
    ),
    (
        "serve --role decode --prefill-servers-file /nowhere",
        "--prefill-servers-file is /nowhere; it cannot be read: No such file",
    ),
    (
        "serve --role decode --prefill-server a:1 --prefill-token-file /nowhere",
        "--prefill-token-file is /nowhere; it cannot be read: No such file",
    ),
    (
        "serve --role decode --prefill-server a:1 --prefill-tls-ca /nowhere",
        "--prefill-tls-ca is /nowhere; it cannot be read: No such file",
    ),
    ("serve --role decode", "--role is decode; no server computes its prompts"),
    ("serve --weights awq", "--weights is awq; choose auto, int8"),
    ("serve --bundle /nowhere", "--bundle is /nowhere; its manifest.json cannot be read: No such"),
    ("serve --decode-mesh 2", "--prefill-mesh and --decode-mesh go together"),
    ("bench offline --model /nowhere", NO_FOLDER),
    ("bench startup --model /nowhere", NO_FOLDER),
    ("bench offline --speculate draft --draft-model /nowhere", NO_FOLDER),
    ("bench startup --speculate draft --draft-model /nowhere", NO_FOLDER),
    *of_engine("bench offline"),
    *of_engine("bench startup"),
    ("bench offline --batch 0", "--batch is 0; it must be above 0"),
    ("bench offline --batch x", "--batch is x; it must be a list like 1,2,4"),
    ("bench offline --batch 8 --max-batch 4", "--batch asks for 8 sequences a lane, more than"),
    ("bench offline --prompt-tokens x", "--prompt-tokens is x; it must be a list like 1,2,4"),
    ("bench offline --output-tokens x", "--output-tokens is x; it must be a list like 1,2,4"),
    ("bench offline --output-tokens 0 --prompt-tokens 0", "both 0, so nothing is left to measure"),
    ("bench offline --max-context 64", "pp128+tg64 takes 192 tokens, more than the context of 64"),
    ("bench offline --repetitions 0", "--repetitions is 0; it must be above 0"),
    ("bench offline --seed -1", "--seed is -1; it must be above -1"),
    ("bench startup --repetitions 0", "--repetitions is 0; it must be above 0"),
    *OF_BENCHES,
    ("bench serve --target grpc://localhost:1 --trace /nowhere", "--trace is /nowhere; it cannot"),
    ("bench overload --trace /nowhere", "--trace is of `bench serve` (leave it out)"),
    ("bench overload --plot /nowhere/x", "no file can be written there"),
    ("plan llama3.1-8b --topology v5e:1x1 --plot /nowhere/x", "no file can be written there"),
    ("plan llama3.1-8b --topology v5e:1x1 --html /", "no file can be written there"),
    ("plan llama3.1-8b --topology cpu --out tests", "--out is tests; there is a bundle or a file"),
    ("plan --topology cpu --model /nowhere", "--model is /nowhere; /nowhere cannot be read"),
    (
        "plan --topology cpu",
        "the model is missing: give a folder, org/name of the hub, or one of deepseek-v3",
    ),
    ("plan /nowhere --topology cpu", "--model is /nowhere; /nowhere cannot be read"),
    ("plan llama3.1-8b --topology v9", "--topology is v9; there is no such topology"),
    ("plan llama3.1-8b --topology cpu --weights awq", "--weights is awq; choose"),
    ("plan llama3.1-8b --topology cpu --max-batch 0", "--max-batch is 0"),
    ("convert /nowhere /tmp/x", NO_FOLDER),
    (f"convert {BUNDLED} /tmp/x --to hf --weights int8", "--to hf writes no quantized weights"),
    ("client --temperature 9 text", "temperature is 9.0"),
    ("client --address http://a:1 text", "--address is http://a:1; it must be HOST:PORT"),
    (
        "client --token-file /nowhere text",
        "--token-file is /nowhere; it cannot be read: No such file",
    ),
    ("client --tls-ca /nowhere text", "TLS ca is /nowhere; it cannot be read: No such file"),
    ("client --tls-ca README.md text", "TLS ca is README.md; it holds no certificate in PEM"),
    ("client --tls-cert README.md --tls-key README.md text", "holds no certificate in PEM"),
    ("client --tls-cert README.md text", "a TLS certificate goes with its key"),
    ("client --json-schema /nowhere text", "--json-schema: /nowhere: No such file"),
    ("client --lark /nowhere text", "--lark: /nowhere: No such file"),
]
# All in one process, which would take a second for each of its own.
SCRIPT = """
import contextlib, io, json, sys
sys.modules.update(jax=None, jaxlib=None)
from jaxserve.programs import start
lines = []
for command in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = start(command.split())
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = repr(error)
    lines.append([code, said.getvalue()])
print(json.dumps(lines))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[object, str]]:
    commands = [command for command, _ in REFUSED]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(commands),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(zip(commands, json.loads(done.stdout), strict=True))


@pytest.mark.system
@pytest.mark.parametrize(("command", "problem"), REFUSED, ids=[command for command, _ in REFUSED])
def test_refused_without_jax(
    command: str, problem: str, answers: dict[str, tuple[object, str]]
) -> None:
    code, said = answers[command]
    (line,) = said.splitlines()
    assert code == 2 and line.startswith("error: ") and problem in line, line


WITHOUT_A_CACHE = ("generate", "serve", "bench offline", "bench startup")
# Flags whose places are found wrong elsewhere, and where.
LATER = {
    **{
        f"{program} --compilation-cache": "test_kept_steps.py: the program goes on without it"
        for program in WITHOUT_A_CACHE
    },
    "bench serve --model": "the server that it starts ends, and says why",
    "bench overload --model": "the server that it starts ends, and says why",
}
METAVARS = ("HOST:PORT", "URL", "MODEL", "FILE", "F", "DIR")


def flags_of_places() -> Iterator[tuple[str, str]]:
    """Yield program and flag, for every flag whose value is a file, a folder or an address."""
    for program, (module, _) in PROGRAMS.items():
        made = [(program, import_module(module).parser())]
        for name, each in made:
            for action in each._actions:
                if isinstance(action, argparse._SubParsersAction):
                    made += [(f"{name} {word}", child) for word, child in action.choices.items()]
                elif action.option_strings and (
                    action.metavar in METAVARS or action.dest == "host" or "port" in action.dest
                ):
                    yield name, action.option_strings[-1]


def test_every_flag_of_a_place_is_tried_with_a_wrong_one() -> None:
    # The last flag of a command is the one with the wrong value.
    tried = {
        (program, [word for word in command.split() if word.startswith("--")][-1])
        for command, _ in REFUSED
        for program, _ in flags_of_places()
        if f"{command} ".startswith(f"{program} ") and " --" in command
    }
    missing = [f"{program} {flag}" for program, flag in flags_of_places()]
    missing = [each for each in missing if tuple(each.rsplit(" ", 1)) not in tried]
    assert sorted(missing) == sorted(LATER)


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")
    check_file("--token-file", tmp_path / "token")  # opening it would wait for a writer


@pytest.mark.parametrize("words", [["--model", "F", "a b", "c"], ["a b", "c", "--model", "F"]])
def test_with_a_model_flag_every_argument_is_a_prompt(words: list[str]) -> None:
    options = parse([*words, "--prompt", "d"])
    assert options.model == Path("F") and options.given_prompts == ["a b", "c", "d"]


@pytest.mark.parametrize("text", ["Once upon a time", "long " * 200])
def test_a_text_alone_may_be_a_prompt(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([text]) == 2
    assert "(if it is a prompt, give it with --prompt)" in capsys.readouterr().err


def test_the_bundled_model_can_be_named_by_the_flag() -> None:
    options = parse(["--model", str(BUNDLED), "text"])
    assert options.model == Path(BUNDLED) and options.given_prompts == ["text"]


def test_the_names_of_precisions_are_those_that_are_loaded() -> None:
    assert tuple(SCHEMES) == FORMS and tuple(DTYPES) == DTYPE_NAMES
    assert AS_STORED == orbax_store.AS_STORED


def test_the_names_of_kernels_are_those_that_are_built_in() -> None:
    assert tuple(dispatch.IMPLEMENTATIONS) == ATTENTION_KERNELS
    assert tuple(dispatch.GROUPED) == tuple(dispatch.QUANTIZED) == KERNELS
