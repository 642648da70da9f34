"""Agents at work: each reads a file, edits it, runs a test and ends, as a scripted model tells it.

The programs are unmodified, offline and without an account. `make test-agents` installs them; the
folder is named by JAXSERVE_AGENTS.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve.chat import Chat
from tests import fake_model
from tests.byte_tokenizer import ByteTokenizer
from tests.jaxserve.server import harness
from tests.jaxserve.server.http.harness import Http
from tests.jaxserve.server.http.scripted_model import FORMS, MarkedTokenizer, speaking

FOLDER = os.environ.get("JAXSERVE_AGENTS", "")
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not FOLDER, reason="JAXSERVE_AGENTS is not set (make test-agents)"),
]
SIZES = {"max_context": 2**17, "num_pages": 2**15, "step_tokens": 8192}
ASKED = "Mend the function in sum.py."
DONE = "I have mended the function."
WRONG = "def add(a, b):\n    return a - b\n"
RIGHT = "def add(a, b):\n    return a + b\n"
TEST = "from sum import add\n\nassert add(7, 5) == 12\nopen('passed', 'w').close()\n"
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "NO_PROXY": "127.0.0.1",
}

Call = tuple[str, Mapping[str, Any]]
# Given the server and the folder, the command and variables of its environment.
Agent = Callable[[Http, Path], tuple[list[str], dict[str, str]]]


def scripted(monkeypatch: pytest.MonkeyPatch, calls: Sequence[Call]) -> list[str]:
    """Let the model make the calls one after the other, and end; return the prompts as they come.

    Which call is next is told by the number of results in the prompt. A prompt without tools, such
    as one that asks for a title, is answered with text at once.
    """
    prompts = list[str]()
    answers = dict[int, list[int]]()  # by the length of the prompt
    render = Chat.render
    write = FORMS["hermes"][1]

    def answer(text: str) -> str:
        done = text.count("\ntool: ")
        if done >= len(calls) or not text.startswith("["):
            return DONE
        name, arguments = calls[done]
        return write(json.dumps(arguments)).replace('"add"', json.dumps(name))

    def rendered(self: Chat, *args: Any, **kwargs: Any) -> Any:
        found = render(self, *args, **kwargs)
        prompts.append(found.text)
        ids = MarkedTokenizer().ids(answer(found.text))
        answers[len(found.token_ids)] = [*ids, *ByteTokenizer.eos_ids]
        return found

    def choose(
        rules: fake_model.Rules, total: int, position: int, penalty: int, mask: object = None
    ) -> int:
        script = answers[rules.end_after]
        return script[min(position - rules.end_after, len(script) - 1)]

    monkeypatch.setattr(harness, "ByteTokenizer", MarkedTokenizer)
    monkeypatch.setattr(Chat, "render", rendered)
    monkeypatch.setattr(fake_model.Rules, "choose", choose)
    return prompts


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with a wrong function and a test of it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "sum.py").write_text(WRONG)
    (folder / "test_sum.py").write_text(TEST)
    return folder


def check(project: Path, told: str, prompts: Sequence[str]) -> None:
    """Check that the agent did all of its work, and that the model saw what came of it."""
    assert (project / "sum.py").read_text() == RIGHT
    assert (project / "passed").exists()
    assert DONE in told
    last = max(prompts, key=lambda prompt: prompt.count("\ntool: "))
    assert last.count("\ntool: ") == 3 and "return a - b" in last


async def run(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> str:
    """Return what a program prints."""
    process = await asyncio.create_subprocess_exec(
        str(Path(FOLDER, "node_modules", ".bin", command[0])),
        *command[1:],
        cwd=folder,
        env={**os.environ, **QUIET, "PWD": str(folder), **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(240):
            told, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, told.decode()
    return told.decode()


def codex(http: Http, project: Path) -> tuple[list[str], dict[str, str]]:
    home = project.parent / "codex"
    home.mkdir()
    (home / "config.toml").write_text(
        'model_provider = "local"\nmodel = "fake"\nmodel_context_window = 131072\n'
        "[model_providers.local]\n"
        f'name = "local"\nbase_url = "{http.base}/v1"\nwire_api = "responses"\n'
    )
    command = ["codex", "exec", "--skip-git-repo-check"]
    command += ["--dangerously-bypass-approvals-and-sandbox", ASKED]
    return command, {"CODEX_HOME": str(home)}


def claude(http: Http, project: Path) -> tuple[list[str], dict[str, str]]:
    command = ["claude", "-p", ASKED, "--allowedTools", "Read", "Edit", "Bash"]
    return command, {
        "HOME": str(project.parent),
        "ANTHROPIC_BASE_URL": http.base,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "fake",
    }


def opencode(package: str) -> Agent:
    """Return what begins opencode with one of its providers."""

    def begin(http: Http, project: Path) -> tuple[list[str], dict[str, str]]:
        limits = {"context": 131072, "output": 32000}
        provider = {
            "npm": package,
            "options": {"baseURL": f"{http.base}/v1", "apiKey": "none"},
            "models": {"fake": {"limit": limits}},
        }
        config = {"provider": {"local": provider}, "autoupdate": False, "share": "disabled"}
        (project / "opencode.json").write_text(json.dumps(config))
        command = ["opencode", "run", "--model", "local/fake", ASKED]
        return command, {"HOME": str(project.parent), "XDG_DATA_HOME": str(project.parent / "data")}

    return begin


def edits(project: Path) -> list[Call]:
    file = str(project / "sum.py")
    return [
        ("Read", {"file_path": file}),
        ("Edit", {"file_path": file, "old_string": "a - b", "new_string": "a + b"}),
        ("Bash", {"command": "python3 test_sum.py", "description": "Run the test"}),
    ]


def edits_in_camel_case(project: Path) -> list[Call]:
    file = str(project / "sum.py")
    return [
        ("read", {"filePath": file}),
        ("edit", {"filePath": file, "oldString": "a - b", "newString": "a + b"}),
        ("bash", {"command": "python3 test_sum.py", "description": "Run the test"}),
    ]


def shells(project: Path) -> list[Call]:
    commands = ("cat sum.py", "sed -i 's/a - b/a + b/' sum.py", "python3 test_sum.py")
    return [("exec_command", {"cmd": command}) for command in commands]


@pytest.mark.parametrize(
    ("agent", "calls"),
    [
        pytest.param(codex, shells, id="codex"),
        pytest.param(claude, edits, id="claude"),
        *(
            pytest.param(opencode(f"@ai-sdk/{name}"), edits_in_camel_case, id=f"opencode-{name}")
            for name in ("openai", "anthropic", "openai-compatible")
        ),
    ],
)
def test_an_agent_mends_a_function(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    project: Path,
    agent: Agent,
    calls: Callable[[Path], list[Call]],
) -> None:
    prompts = scripted(monkeypatch, calls(project))
    folder = tmp_path / "model"
    folder.mkdir()

    async def main() -> None:
        async with speaking(folder, monkeypatch, FORMS["hermes"][0], **SIZES) as http:
            command, env = agent(http, project)
            told = await run(command, project, env)
            check(project, told, prompts)
            await http.server.at_rest()

    asyncio.run(main())
