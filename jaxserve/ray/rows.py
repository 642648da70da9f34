"""Text for the rows of a Ray Data dataset, by an AsyncLLM in each of its actors."""

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any, Unpack

import pyarrow as pa
from ray.data import Dataset

from jaxserve.async_llm import AsyncLLM
from jaxserve.completion import Completion
from jaxserve.errors import ConfigError, EngineError, JaxserveError, RequestError
from jaxserve.ray.actor_pools import actor_pool
from jaxserve.ray.plain_values import without_nulls
from jaxserve.sampling_params import SamplingFields, SamplingParams
from jaxserve.server.lifecycle import FAILED

PROMPTS = ("prompt", "messages")
SAMPLING = "sampling"
ANSWER = pa.schema(
    [
        ("generated_text", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("seed", pa.uint64()),
        ("error", pa.string()),
    ]
)
log = logging.getLogger(__name__)


def generate_rows(
    rows: Dataset,
    model: str,
    *,
    replicas: int = 1,
    resources: Mapping[str, float] | None = None,
    options: Mapping[str, Any] | None = None,
    batch_size: int = 32,
    batches_in_flight: int = 4,
    restarts: int = 10,
    **sampling: Unpack[SamplingFields],
) -> Dataset:
    """Generate for every row of a dataset, with one AsyncLLM on each of some hosts.

    A row has a column `prompt`, which is a text or a list of token ids, or `messages`, which is a
    conversation; it may have `sampling`, fields of SamplingParams for this row. Its other columns
    stay. The answer is in `generated_text`, `finish_reason`, `prompt_tokens`, `output_tokens` and
    `seed`; a row that cannot be answered has `error` and none of these.

    Rows are answered in any order. As soon as all rows of a batch have their answers, the batch
    goes on through the dataset. Where an actor, its engine or its host fails, Ray starts the actor
    again, which answers its batches once more; after `restarts` failures the job fails.

    Args:
        rows: Dataset of prompts.
        model: Folder that all hosts have, or org/name[@revision] of a model on the hub.
        replicas: Number of actors, each with the whole model.
        resources: What each of them needs, by Ray's names: {"TPU": 4}, {"GPU": 8}.
        options: Keyword arguments of AsyncLLM.
        batch_size: Rows of a batch.
        batches_in_flight: Batches that an actor works on at a time. With batch_size it bounds the
            requests that an engine can choose from.
        restarts: How often each actor is started again.
        **sampling: Fields of SamplingParams for all rows.

    Returns:
        The dataset with the answers, which like all datasets does nothing until it is consumed.

    Raises:
        RequestError: A field of `sampling` is wrong.
    """
    _params_of({}, sampling)
    needs = dict(resources or {})
    return rows.repartition(target_num_rows_per_block=batch_size).map_batches(
        RowGenerator,
        fn_constructor_args=(model, dict(options or {}), dict(sampling)),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=actor_pool(replicas, batches_in_flight),
        num_cpus=needs.pop("CPU", 1),
        num_gpus=needs.pop("GPU", 0),
        resources=needs,
        max_restarts=restarts,
    )


class RowGenerator:
    """Answers batches of rows; several at a time.

    Args:
        model: Model, as AsyncLLM takes it.
        options: Keyword arguments of AsyncLLM.
        sampling: Fields of SamplingParams for all rows.
    """

    def __init__(self, model: str, options: Mapping[str, Any], sampling: SamplingFields):
        self._llm = AsyncLLM(model, **options)
        self._sampling = sampling

    async def __call__(self, batch: pa.Table) -> pa.Table:
        """Return the rows with their answers."""
        if taken := [name for name in ANSWER.names if name in batch.column_names]:
            raise ConfigError(f"the rows have a column {taken[0]} already; rename it")
        answers = await asyncio.gather(*map(self._answer, batch.to_pylist()))
        columns = pa.Table.from_pylist(answers, schema=ANSWER)
        for name in ANSWER.names:
            batch = batch.append_column(ANSWER.field(name), columns[name])
        return batch

    async def _answer(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            return _columns_of(await self._complete(without_nulls(row)))
        except EngineError as error:
            # Ray starts an actor again whose process ends, and gives it the batches once more.
            log.critical("the engine has failed: %s", error)
            os._exit(FAILED)
        except JaxserveError as error:
            return {"error": str(error)}

    async def _complete(self, row: dict[str, Any]) -> Completion:
        given = [name for name in PROMPTS if row.get(name) is not None]
        if len(given) != 1:
            raise RequestError("row", f"has {' and '.join(given) or 'neither prompt nor messages'}")
        params = _params_of(row, self._sampling)
        deltas = [delta async for delta in self._llm.stream(row[given[0]], params)]
        completion = deltas[-1].completion
        assert completion
        return completion


def _params_of(row: Mapping[str, Any], sampling: SamplingFields) -> SamplingParams:
    """Return the sampling parameters of a row: its own fields before those of all rows."""
    own = row.get(SAMPLING, {})
    if not isinstance(own, Mapping):
        raise RequestError(SAMPLING, f"is {own!r:.80}; give an object of fields of SamplingParams")
    try:
        params = SamplingParams(**{**sampling, **own})
    except TypeError as error:  # a name that is none
        raise RequestError(SAMPLING, f"has an unknown field: {error}") from None
    if params.n > 1:
        raise RequestError("n", f"is {params.n}; a row has one answer (repeat the row)")
    return params


def _columns_of(completion: Completion) -> dict[str, Any]:
    if completion.error:
        return {"error": str(completion.error)}
    return {
        "generated_text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(completion.prompt_token_ids),
        "output_tokens": len(completion.token_ids),
        "seed": completion.seed,
    }
