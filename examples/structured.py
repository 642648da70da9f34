"""Answers that are objects of a Python class, whatever the model.

python examples/structured.py --model DIR "Describe a friendly animal."
"""

import argparse
from typing import Literal

from pydantic import BaseModel, Field

from jaxserve import LLM, SamplingParams, Structure


class Animal(BaseModel):
    name: str = Field(max_length=20)
    legs: int = Field(ge=0, le=8)
    size: Literal["small", "large"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="checkpoints/bundled/tiny-chat", metavar="DIR")
    parser.add_argument("question", nargs="?", default="Describe a friendly animal.")
    args = parser.parse_args()

    structure = Structure.of("json_schema", Animal.model_json_schema())
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=100, structure=structure)
    with LLM(args.model) as llm:
        (completion,) = llm.chat([{"role": "user", "content": args.question}], params)
    # Only tokens that go on with the schema can be chosen, so parsing fails only for a text that
    # max_tokens has cut off.
    print(repr(Animal.model_validate_json(completion.text)))


if __name__ == "__main__":
    main()
