"""Offline generation with transformers as its users run it, the peer of benchmarks.offline.

Batches are static, with left padding, and run until the longest of the batch is done.

Started by benchmarks.offline in an environment of its own (torch and transformers; nothing of
jaxserve). Reads one JSON job per line and answers each with one JSON line.
"""

import json
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]
from transformers.utils import logging  # pyright: ignore[reportMissingImports]


@torch.inference_mode()
def generate(model: torch.nn.Module, prompts: list[list[int]], new_tokens: int) -> int:
    """Generate greedily, blind to end tokens; return the tokens generated for each prompt.

    Prompts are of one length.
    """
    ids = torch.tensor(prompts)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0,
    )
    return out.shape[1] - ids.shape[1]


def run(model: torch.nn.Module, job: dict) -> float:
    """Return the seconds for all requests, `streams` at a time in the order given."""
    began = time.perf_counter()
    for start in range(0, len(job["lengths"]), job["streams"]):
        lengths = job["lengths"][start : start + job["streams"]]
        made = generate(model, job["prompts"][start : start + job["streams"]], max(lengths))
        assert made == max(lengths), f"{made} tokens instead of {max(lengths)}"
    return time.perf_counter() - began


def main() -> None:
    folder = sys.argv[1]
    dtype = sys.argv[2]
    threads = int(sys.argv[3])
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    # The attention that transformers chooses by itself: sdpa, where the model has it.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": run(model, json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
