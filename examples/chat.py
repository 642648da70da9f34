"""A conversation on a terminal; every answer appears as it is generated.

python examples/chat.py --model DIR

An empty line, or the end of the input, ends the conversation.
"""

import argparse

from jaxserve import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="checkpoints/bundled/tiny-chat", metavar="DIR")
    args = parser.parse_args()

    params = SamplingParams(temperature=0.5, max_tokens=256)
    messages: list[dict[str, str]] = []
    with LLM(args.model) as llm:
        while said := read_line():
            messages.append({"role": "user", "content": said})
            answer = ""
            # The whole conversation is the prompt. What earlier turns computed is in the prefix
            # cache, so only the new turn is computed.
            for delta in llm.stream(messages, params):
                print(delta.text, end="", flush=True)
                answer += delta.text
            print()
            messages.append({"role": "assistant", "content": answer})


def read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
