"""Answer a batch file in OpenAI's format on a Ray cluster, and go on where a stopped job was.

python examples/ray_batch.py requests.jsonl answers --model DIR --replicas 2 --hosts 2 --chips 4

Every server runs on `--hosts` hosts with `--chips` TPU chips each. What is answered is noted in the
folder `answers.done`: the same command leaves it out. Both folders are on a disk that all nodes
mount, or in a bucket. Without a cluster this machine becomes one.
"""

import argparse

from ray.data import DataContext
from ray.data.checkpoint import CheckpointConfig

from jaxserve.ray import Place, answer_requests, read_requests, write_answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requests", help="batch file")
    parser.add_argument("answers", help="folder for files of answers")
    parser.add_argument("--model", default="checkpoints/bundled/tiny-chat", metavar="DIR")
    parser.add_argument("--replicas", type=int, default=1, metavar="N")
    parser.add_argument("--hosts", type=int, default=1, metavar="N")
    parser.add_argument("--chips", type=int, default=0, metavar="N")
    args = parser.parse_args()

    DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column="id",
        checkpoint_path=f"{args.answers}.done",
        delete_checkpoint_on_success=False,
    )
    place = Place(hosts=args.hosts, resources={"TPU": args.chips} if args.chips else {})
    answers = answer_requests(
        read_requests(args.requests),
        ["serve", args.model],
        replicas=args.replicas,
        place=place,
    )
    write_answers(answers, args.answers)


if __name__ == "__main__":
    main()
