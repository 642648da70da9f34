"""Answer every prompt of a JSON Lines file, and write one line per answer.

python examples/batch.py --model DIR < prompts.jsonl > answers.jsonl

A line in is {"id": ..., "prompt": ...}. A line out has the id, the text, why it ended, and the
seed that draws the same text again.
"""

import argparse
import json
import sys

from jaxserve import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="checkpoints/bundled/tiny-chat", metavar="DIR")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    args = parser.parse_args()

    lines = [json.loads(line) for line in sys.stdin]
    params = SamplingParams(temperature=0.7, max_tokens=args.max_tokens)
    with LLM(args.model) as llm:
        # All prompts in one call: the engine keeps its rows full until the last one has finished.
        completions = llm.generate([line["prompt"] for line in lines], params)
    for line, completion in zip(lines, completions, strict=True):
        answer = {
            "id": line["id"],
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "seed": completion.seed,
        }
        print(json.dumps(answer, ensure_ascii=False))


if __name__ == "__main__":
    main()
