"""lm_eval through the server, against lm_eval through transformers: both give one result.

lm_eval needs torch, so it has an environment of its own: `make test-lm-eval`.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.jaxserve.server.test_serve_process import DRAFT, Process, launch

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(600)]
HERE = Path(__file__).with_name("lm_eval")
BOS = 1
TASKS = ("sums_choice", "sums_perplexity", "sums_generation")
TOLERANCE = 1e-3  # of a log-probability of a whole continuation, in nats


@dataclass(frozen=True)
class Way:
    """One way to call the server, and what transformers has to be asked for the same figures."""

    kind: str
    path: str
    arguments: str
    ours: str = ""
    flags: tuple[str, ...] = ()
    tasks: tuple[str, ...] = TASKS


WAYS = {
    "tokenizer of the folder": Way(
        "local-completions", "/v1/completions", f"tokenizer={DRAFT},num_concurrent=4"
    ),
    "tokenizer of the server": Way(
        "local-completions",
        "/v1/completions",
        f"tokenizer_backend=remote,custom_prefix_token_id={BOS}",
        ours="add_bos_token=False",
    ),
    "chat": Way(
        "local-chat-completions",
        "/v1/chat/completions",
        "num_concurrent=4",
        flags=("--apply_chat_template",),
        tasks=("sums_generation",),
    ),
}


@pytest.fixture(scope="module")
def lm_eval(request: pytest.FixtureRequest) -> Path:
    program = request.config.getoption("--lm-eval")
    if not program:
        pytest.skip("lm_eval has an environment of its own: make test-lm-eval")
    return program.resolve()


@pytest.fixture(scope="module")
def server(lm_eval: Path) -> Iterator[Process]:
    process = launch()
    try:
        process.client().close()
        yield process
    finally:
        process.popen.terminate()
        process.wait()


@pytest.mark.parametrize("name", WAYS)
def test_figures_are_those_of_transformers(
    lm_eval: Path, server: Process, tmp_path: Path, name: str
) -> None:
    way = WAYS[name]
    address = f"model={DRAFT.name},base_url={server.http}{way.path}"
    served = run(lm_eval, tmp_path / "served", way, way.kind, f"{address},{way.arguments}")
    model = f"pretrained={DRAFT},dtype=float32"
    computed = run(lm_eval, tmp_path / "computed", way, "hf", f"{model},{way.ours}".rstrip(","))
    assert served.keys() == computed.keys() and len(served) == 12 * len(way.tasks)
    for (task, document), responses in computed.items():
        compare(task, served[task, document], responses)


def run(
    lm_eval: Path, out: Path, way: Way, kind: str, arguments: str
) -> dict[tuple[str, int], Any]:
    """Return the responses of every task's documents, by task and document."""
    batch = "1" if way.flags else "4"
    command = [str(lm_eval), "run", "--model", kind, "--model_args", arguments]
    command += ["--include_path", "tasks", "--tasks", *way.tasks, "--batch_size", batch]
    command += ["--device", "cpu", "--output_path", str(out), "--log_samples", *way.flags]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "hub")}
    done = subprocess.run(
        command, cwd=HERE, env=os.environ | offline, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return {
        (file.name[len("samples_") :].rsplit("_", 1)[0], sample["doc_id"]): sample["filtered_resps"]
        for file in out.rglob("samples_*.jsonl")
        for sample in map(json.loads, file.read_text().splitlines())
    }


def compare(task: str, served: Any, computed: Any) -> None:
    """Compare texts, or log-probabilities and whether each continuation is the greedy one.

    lm_eval writes all of them as text: "-0.5" of a whole text, ["-0.5", "False"] of a choice.
    """
    if task == "sums_generation":
        assert served == computed
        return
    assert len(served) == len(computed)
    for ours, theirs in zip(served, computed, strict=True):
        ours_logprob, *ours_greedy = [ours] if isinstance(ours, str) else ours
        theirs_logprob, *theirs_greedy = [theirs] if isinstance(theirs, str) else theirs
        assert float(ours_logprob) == pytest.approx(float(theirs_logprob), abs=TOLERANCE)
        assert ours_greedy == theirs_greedy
