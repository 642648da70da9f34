"""Upload and download of a step: what the host sends with a launch, and what comes back."""

from collections.abc import Mapping

import numpy as np

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.packed import Packed, padded
from jaxserve.engine.events import Logprob
from jaxserve.engine.plan import LaneOutput, LanePlan
from jaxserve.sampling_params import MAX_LOGPROBS

# ---- the upload


def upload_layout(bucket: Bucket, groups: int, page_size: int) -> Packed:
    """Return the layout of one lane's upload; names are those of LanePlan, but for fresh pages."""
    fresh = (groups, bucket.fresh_pages(page_size))
    fields: list[tuple[str, tuple[int, ...], type]] = [
        ("rows", (bucket.rows,), np.int32),  # out of range for padding
        ("sizes", (bucket.rows,), np.int32),
        ("samples", (bucket.rows,), np.int32),
        # New entries of page tables, per group.
        ("fresh_row", fresh, np.int32),
        ("fresh_index", fresh, np.int32),
        ("fresh_page", fresh, np.int32),
    ]
    if bucket.kind != "decode":  # decode steps continue from tokens on the device
        fields.append(("tokens", (bucket.tokens,), np.int32))
    if bucket.kind == "score":
        fields.append(("targets", (bucket.tokens,), np.int32))
    if bucket.kind == "draft":  # the draft model may be behind the row
        fields.append(("starts", (bucket.rows,), np.int32))
    return Packed(tuple(fields))


def pack_lane(
    plan: LanePlan,
    bucket: Bucket,
    layout: Packed,
    *,
    page_size: int,
    groups: int,
    padding_row: int,
) -> np.ndarray:
    """Pack one lane's columns, padded to the bucket.

    Args:
        padding_row: Row id that is out of range, so that the device ignores what padding says.
    """
    fresh_row = np.full((groups, bucket.fresh_pages(page_size)), padding_row, np.int32)
    fresh_index = np.zeros_like(fresh_row)
    fresh_page = np.zeros_like(fresh_row)
    counts = [0] * groups
    for group, row, index, page in plan.fresh:
        entry = group, counts[group]
        fresh_row[entry] = row
        fresh_index[entry] = index
        fresh_page[entry] = page
        counts[group] += 1
    values = {"fresh_row": fresh_row, "fresh_index": fresh_index, "fresh_page": fresh_page}
    for name, shape, _ in layout.fields:
        if name not in values:
            fill = padding_row if name == "rows" else 0
            values[name] = padded(getattr(plan, name), shape[0], fill)
    return layout.pack(values)


# ---- the download


def download_layout(bucket: Bucket, width: int = 0) -> Packed:
    """Return the layout of one lane's download.

    Every kind of step has `finite`, per chunk: 1 where all its results are finite.
    Draft steps have nothing else.
    Embed steps have an embedding of `width` numbers per chunk.
    All others have sampled tokens, of which the first n_new count, with log-probabilities.
    Score steps have log-probabilities of every target, too.
    """
    rows = bucket.rows
    results = bucket.max_row_results
    top = MAX_LOGPROBS
    if bucket.kind == "draft":
        return Packed((("finite", (rows,), np.int32),))
    if bucket.kind == "embed":
        return Packed((("finite", (rows,), np.int32), ("embedding", (rows, width), np.float32)))
    fields: list[tuple[str, tuple[int, ...], type]] = [
        ("n_new", (rows,), np.int32),
        ("tokens", (rows, results), np.int32),
        ("finite", (rows,), np.int32),
        ("logprob", (rows, results), np.float32),
        ("top_ids", (rows, results, top), np.int32),
        ("top_logprobs", (rows, results, top), np.float32),
    ]
    if bucket.kind == "score":
        fields += [
            ("target_logprob", (bucket.tokens,), np.float32),
            ("target_top_ids", (bucket.tokens, top), np.int32),
            ("target_top_logprobs", (bucket.tokens, top), np.float32),
        ]
    return Packed(tuple(fields))


def unpack_lane(plan: LanePlan, layout: Packed, array: np.ndarray) -> LaneOutput:
    """Read the results of the plan's chunks from one lane's [size] array."""
    out = layout.unpack_on_host(array)
    count = len(plan.rows)
    chunks = range(count)
    finite = [bool(flag) for flag in out["finite"][:count].tolist()]
    if "embedding" in out:
        embeddings = out["embedding"][:count].tolist()
        return LaneOutput([[] for _ in chunks], finite, embeddings=embeddings)
    if "tokens" not in out:
        return LaneOutput([[] for _ in chunks], finite)
    n_new = out["n_new"].tolist()
    tokens = out["tokens"].tolist()
    result = LaneOutput([tokens[i][: n_new[i]] for i in chunks], finite)
    if plan.logprobs:
        result.logprobs = _sampled_logprobs(out, tokens, n_new[:count])
    if "target_logprob" in out:
        names = ("target_logprob", "target_top_ids", "target_top_logprobs")
        columns = [out[name].tolist() for name in names]
        # Columns are as long as the bucket; behind the plan's targets there is padding.
        result.prompt_logprobs = [
            _logprob(*entry) for entry in zip(plan.targets, *columns, strict=False)
        ]
    return result


def _sampled_logprobs(
    out: Mapping[str, np.ndarray], tokens: list[list[int]], n_new: list[int]
) -> list[list[Logprob]]:
    """Return log-probabilities of the first n_new tokens of each chunk."""
    logprob = out["logprob"].tolist()
    top_ids = out["top_ids"].tolist()
    top_logprobs = out["top_logprobs"].tolist()
    found = []
    for i, count in enumerate(n_new):
        # A chunk's entries are padded to bucket.max_row_results.
        entries = zip(tokens[i][:count], logprob[i], top_ids[i], top_logprobs[i], strict=False)
        found.append([_logprob(*entry) for entry in entries])
    return found


def _logprob(token: int, logprob: float, top_ids: list[int], top_logprobs: list[float]) -> Logprob:
    return Logprob(token, logprob, tuple(zip(top_ids, top_logprobs, strict=True)))
