"""Serve OpenAI's API on a Ray cluster, with as many replicas as the load needs.

python examples/ray_serve.py --model DIR --most 4 --chips 4

Each replica has the whole model, on one node with `--chips` TPU chips. Without a cluster this
machine becomes one. A Ctrl-C ends it.
"""

import argparse

from ray import serve

from jaxserve.ray import openai_app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="checkpoints/bundled/tiny-chat", metavar="DIR")
    parser.add_argument("--most", type=int, default=2, metavar="N", help="replicas")
    parser.add_argument("--chips", type=int, default=0, metavar="N")
    parser.add_argument("--port", type=int, default=8000, metavar="N")
    args = parser.parse_args()

    app = openai_app(
        args.model,
        replicas=(1, args.most),
        resources={"TPU": args.chips} if args.chips else {},
    )
    serve.start(http_options={"port": args.port})
    serve.run(app, name="llm", route_prefix="/", blocking=True)


if __name__ == "__main__":
    main()
