"""Program that starts as serve does, and prints a JSON object when each stage has ended.

jaxserve.bench.startup runs it and holds the clock. The program imports late, because importing is a
stage as well.
"""

import json
import sys
from typing import Any

STAGES = ("import", "device", "load", "compile", "first token")


def tell(stage: str, **facts: Any) -> None:
    """Print that a stage has ended."""
    print(json.dumps({"stage": stage} | facts), flush=True)


def main() -> int:
    """Run the program with the flags of bench startup, and return its exit code."""
    from jaxserve.bench.flags import parse
    from jaxserve.cli.exits import exit_code

    options = parse(["startup", *sys.argv[1:]])
    return exit_code(lambda: start(options))


def start(options: Any) -> int:
    """Go through all stages."""
    from rich.console import Console

    from jaxserve.backends import devices, importing_jax

    with importing_jax():
        from jaxserve.bench.offline import about, open_llm
    from jaxserve.compilation_cache import use_compilation_cache
    from jaxserve.sampling_params import SamplingParams

    tell("import")
    devices()
    tell("device")
    use_compilation_cache(options.engine.compilation_cache)
    with open_llm(options, options.engine.options, Console(stderr=True)) as llm:
        tell("load", model=about(llm, options))
        llm.warm_up()
        executables = llm.runner.executables
        tell("compile", programs=executables.programs, compiled=len(executables.missed))
        llm.generate([[0]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        tell("first token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
