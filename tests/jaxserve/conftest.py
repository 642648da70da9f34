"""Time limits that no test meets by chance: a machine may stall for seconds.

A test that needs a limit to pass sets one itself, and lets nothing else happen within it.
"""

from collections.abc import Iterator, Sequence

import pytest

from jaxserve.chat import renderer
from jaxserve.sandbox_process import LineProcess
from jaxserve.structure import grammars

MINUTE = 60.0
HOUR = 3600.0


class PatientProcess(LineProcess):
    """Has a minute for an answer, unless a test gave another limit; of processor time no more."""

    def __init__(self, command: Sequence[str], seconds: float, max_answer_bytes: int) -> None:
        by_default = seconds in (renderer.SECONDS, grammars.DEFAULT_BOUNDS.seconds)
        super().__init__(command, MINUTE if by_default else seconds, max_answer_bytes)


@pytest.fixture(autouse=True, scope="session")
def patience() -> Iterator[None]:
    """Raise the limits that users cannot set, or that hardly any test sets."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (renderer, grammars):
            patch.setattr(module, "LineProcess", PatientProcess)
        patch.setattr("jaxserve.cluster.transfer.prefill.SILENCE", HOUR)
        patch.setattr("jaxserve.server.lifecycle.GRACE", MINUTE)
        patch.setattr("jaxserve.engine.engine_thread.EngineThread.close.__defaults__", (MINUTE,))
        patch.setattr("jaxserve.bench.grpc_caller.CONNECT_SECONDS", MINUTE)
        patch.setattr("jaxserve.bench.openai_caller.SECONDS", MINUTE)
        patch.setattr("jaxserve.bench.target.SECONDS", MINUTE)
        yield
