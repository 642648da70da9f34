"""Rank texts by how near their meaning is to a question.

python examples/embeddings.py --model DIR "How do plants eat?" "Light feeds leaves." "A red car."

DIR is an embedding model, such as Qwen3-Embedding.
"""

import argparse

import numpy as np

from jaxserve import LLM

# What Qwen3-Embedding's authors put before a question; other models have other instructions, in
# config_sentence_transformers.json.
INSTRUCTION = "Instruct: Given a question, retrieve passages that answer it\nQuery:"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--instruction", default=INSTRUCTION, metavar="TEXT")
    parser.add_argument("question")
    parser.add_argument("texts", nargs="+", metavar="text")
    args = parser.parse_args()

    with LLM(args.model) as llm:
        question, *texts = llm.embed([args.instruction + args.question, *args.texts])
    scores = np.stack(texts) @ question  # embeddings have length 1, so this is the cosine
    for i in np.argsort(-scores):
        print(f"{scores[i]:6.3f}  {args.texts[i]}")


if __name__ == "__main__":
    main()
