"""Requests in OpenAI's batch format as Ray Data datasets, answered by servers on the cluster.

Files and lines are those of `jaxserve generate --batch-file`.
"""

import asyncio
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from ray.data import Dataset, read_datasource
from ray.data.block import BlockAccessor
from ray.data.datasource import BlockBasedFileDatasink, FileBasedDatasource

from jaxserve.errors import ConfigError
from jaxserve.generate.batch_format import LineError, id_of_line, lines_of, parse_line, refusal_line
from jaxserve.ray.actor_pools import actor_pool
from jaxserve.ray.group_client import GroupClient
from jaxserve.ray.host_group import HostGroup
from jaxserve.ray.host_program import HostProgram
from jaxserve.ray.placement import Place

BLOCK_ROWS = 1024  # of the blocks that a file is read as
ANSWERS = pa.schema([("id", pa.string()), ("line", pa.binary())])


def read_requests(paths: str | Sequence[str], **options: Any) -> Dataset:
    """Return the lines of batch files as a dataset.

    Custom ids have to be unique over all files, which nothing checks.

    Args:
        paths: Files or folders, wherever Ray Data reads: a path, s3://..., gs://...
        **options: More options of Ray Data's file sources, such as `filesystem`.

    Returns:
        A dataset with columns `id` (of the answer, a digest of the request), `number` (of the line
        in its file) and `line`. `id` is the column for Ray Data's CheckpointConfig, by which a job
        that was stopped goes on where it was.
    """
    return read_datasource(RequestFiles(paths, **options))


def answer_requests(
    requests: Dataset,
    arguments: Sequence[str],
    *,
    replicas: int = 1,
    place: Place | None = None,
    environment: Mapping[str, str] | None = None,
    batch_size: int = 32,
    batches_in_flight: int = 4,
    restarts: int = 10,
) -> Dataset:
    """Answer requests with some servers, each on one host or on several together.

    Requests are answered in any order. As soon as all requests of a batch have their answers, the
    batch goes on through the dataset. Where a server loses a host, it is started again (see
    HostGroup) and answers what it had not. Where the actor dies that watches it, Ray starts that
    again, which starts a new server for its batches; after `restarts` failures the job fails.

    Args:
        requests: Dataset as `read_requests` returns it.
        arguments: Arguments of the servers, as behind `jaxserve` in a shell: ["serve", "org/name",
            "--tensor", "8"].
        replicas: Number of servers.
        place: Hosts of each server.
        environment: Variables for the servers' processes.
        batch_size: Requests of a batch.
        batches_in_flight: Batches that a server works on at a time.
        restarts: How often each actor that watches a server is started again.

    Returns:
        A dataset with columns `id` and `line`, a line of the file of answers.

    Raises:
        ConfigError: The arguments are not those of a server that the group can ask.
    """
    if not HostProgram(tuple(arguments)).wants_token:
        raise ConfigError(
            f"arguments are {' '.join(arguments)!r:.80}; give those of a server, `serve MODEL`, "
            f"without --token-file: it gets a token of its own"
        )
    place = place or Place()
    return requests.repartition(target_num_rows_per_block=batch_size).map_batches(
        RequestAnswerer,
        fn_constructor_args=(list(arguments), place, dict(environment or {})),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=actor_pool(replicas, batches_in_flight),
        num_cpus=0,  # the server's resources are those of its place
        max_restarts=restarts,
    )


def write_answers(answers: Dataset, folder: str, **options: Any) -> None:
    """Write answers as files of lines, one file per block, each as soon as it is there.

    Args:
        answers: Dataset as `answer_requests` returns it.
        folder: Folder to write to, wherever Ray Data writes. What is there stays.
        **options: More options of Ray Data's file sinks, such as `filesystem`.
    """
    answers.write_datasink(AnswerFiles(folder, file_format="jsonl", **options))


class RequestFiles(FileBasedDatasource):
    """Reads batch files; arguments as `read_requests` has them."""

    def _read_stream(self, f: Any, path: str) -> Iterator[pa.Table]:
        rows: list[dict[str, Any]] = []
        for number, line in lines_of(io.BufferedReader(f)):
            rows.append({"id": id_of_line(line), "number": number, "line": line})
            if len(rows) == BLOCK_ROWS:
                yield pa.Table.from_pylist(rows)
                rows = []
        if rows:
            yield pa.Table.from_pylist(rows)


class AnswerFiles(BlockBasedFileDatasink):
    """Writes the lines of blocks; arguments as BlockBasedFileDatasink has them."""

    def write_block_to_file(self, block: BlockAccessor, file: pa.NativeFile) -> None:
        """Write the lines of a block."""
        for line in block.to_arrow()["line"]:
            file.write(line.as_py())


class RequestAnswerer:
    """Answers batches of requests by one server, several batches at a time.

    Args:
        arguments: Arguments of the server.
        place: Hosts of the server.
        environment: Variables for the server's processes.

    Raises:
        ConfigError: The server cannot be started; its own line says why.
    """

    def __init__(self, arguments: Sequence[str], place: Place, environment: Mapping[str, str]):
        self._group = HostGroup(arguments, place, environment)
        self._group.ready()
        self._client = GroupClient(self._group)

    async def __call__(self, batch: pa.Table) -> pa.Table:
        """Return the answers to the requests."""
        rows = batch.to_pylist()
        lines = await asyncio.gather(*(self._answer(row["number"], row["line"]) for row in rows))
        answers = [{"id": row["id"], "line": line} for row, line in zip(rows, lines, strict=True)]
        return pa.Table.from_pylist(answers, schema=ANSWERS)

    def __del__(self) -> None:
        """End the server; Ray Data calls it when the actor has nothing more to do."""
        # There is none where the arguments were refused.
        if group := getattr(self, "_group", None):
            group.kill()

    async def _answer(self, number: int, line: bytes) -> bytes:
        try:
            request = parse_line(line)
        except LineError as error:
            return refusal_line(id_of_line(line), number, error)
        return await self._client.answer(request)
