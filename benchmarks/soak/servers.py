"""The servers: one that generates with tools, one that embeds, each in a process of its own."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.soak.samples import Samples
from jaxserve.bench.own_server import HOST, free_ports, serve_command
from jaxserve.errors import ConfigError
from tests import embedding_model

CONTEXT = 1024  # two tools take some 350 tokens
END_SECONDS = 60  # that a server gets to end after SIGTERM
# The bundled model's template, and before it the tools, in the form of Hermes and Qwen.
TEMPLATE = """\
{{ bos_token }}
{%- if tools %}{{ '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
    {{- 'Call: <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
    {%- for call in message['tool_calls'] or [] %}
        {{- '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
# Half of all grammars are new ones, and the server keeps 64 MiB of them by design: with less, its
# cache is full long before the second half.
GRAMMAR_CACHE = 64 * 1024


@dataclass
class Server:
    """A running server, and what was read of its process.

    Attributes:
        address: gRPC's, HOST:PORT.
        url: HTTP's.
    """

    name: str
    address: str
    url: str
    process: "subprocess.Popen[bytes]"
    samples: Samples = field(default_factory=Samples)

    def take(self, seconds: float) -> None:
        """Read the process once; ConfigError where it has ended."""
        self.require_running()
        self.samples.take(self.process.pid, seconds)

    def require_running(self) -> None:
        code = self.process.poll()
        if code is not None:
            raise ConfigError(f"the server of {self.name} ended with exit code {code}")


@contextlib.contextmanager
def servers(model: Path, deterministic: bool) -> Iterator[list[Server]]:
    """Run both servers for the time of a block; the first generates, the second embeds."""
    with TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        template = Path(folder) / "tools.jinja"
        template.write_text(TEMPLATE)
        embeds = embedding_model.with_tokenizer(Path(folder) / "embeds")
        generation = ["--model", str(model), "--max-context", str(CONTEXT)]
        generation += ["--chat-template", str(template)]
        generation += ["--grammar-cache-bytes", str(GRAMMAR_CACHE)]
        generation += ["--deterministic"] if deterministic else []
        yield [
            stack.enter_context(_server("generation", generation)),
            stack.enter_context(_server("embeddings", ["--model", str(embeds)])),
        ]


@contextlib.contextmanager
def _server(name: str, flags: Sequence[str]) -> Iterator[Server]:
    ports = free_ports(2)
    command = serve_command(ports[0], ports[1], [*flags, "--log-level", "error"])
    process = subprocess.Popen(command)
    try:
        yield Server(name, f"{HOST}:{ports[0]}", f"http://{HOST}:{ports[1]}", process)
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
