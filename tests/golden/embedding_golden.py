"""The golden answer of an embedding model: a tiny Qwen3 in a folder like that of
Qwen3-Embedding-0.6B.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from golden_cases import Case, qwen3
from stored_weights import Stored, Tensors
from transformers import AutoModel, PreTrainedModel  # pyright: ignore[reportMissingImports]

QUERY = (
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
)


def embedding_case() -> Case:
    """Tied, without "model." before the names of its tensors; the config.json of
    Qwen3-Embedding-0.6B.
    """
    bare = Stored(
        encode=lambda tensors: {name.removeprefix("model."): x for name, x in tensors.items()},
        decode=lambda tensors: {f"model.{name}": x for name, x in tensors.items()},
    )
    published = dict(
        bos_token_id=94, eos_token_id=94, max_window_layers=28, transformers_version="4.51.3"
    )
    tied = qwen3(head_dim=16, tie_word_embeddings=True)
    return Case("qwen3_embedding", tied, "type", published, "layer_types pad_token_id", bare)


def sentence_transformers_files(hidden: int) -> dict[str, Any]:
    """Path -> content of what says how hidden states become embeddings: the last token's,
    normalized.
    """
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        dict(idx=index, name=str(index), path=path, type=f"sentence_transformers.models.{kind}")
        for index, (path, kind) in enumerate(steps)
    ]
    modes = [
        "cls_token",
        "mean_tokens",
        "max_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    ]
    pooling = {f"pooling_mode_{mode}": mode == "lasttoken" for mode in modes}
    prompts = dict(
        prompts=dict(query=QUERY, document=""),
        default_prompt_name=None,
        similarity_fn_name="cosine",
    )
    return {
        "modules.json": modules,
        "1_Pooling/config.json": dict(
            word_embedding_dimension=hidden, **pooling, include_prompt=True
        ),
        "config_sentence_transformers.json": prompts,
    }


def load_encoder(folder: Path) -> PreTrainedModel:
    return AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def embed(encoder: PreTrainedModel, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[B, D] of the first `lengths` [B] tokens of prompts [B, P], one prompt at a time."""
    last = [
        encoder(row[None, :length]).last_hidden_state[0, -1]
        for row, length in zip(prompts, lengths, strict=True)
    ]
    return torch.nn.functional.normalize(torch.stack(last), dim=-1)


def embedding_answer(encoder: PreTrainedModel, prompts: torch.Tensor) -> Tensors:
    """What golden.npz has beyond that of a decoder: of the second prompt only the beginning is
    embedded.
    """
    lengths = torch.tensor([prompts.shape[1], prompts.shape[1] - 9])
    return dict(lengths=lengths, embeddings=embed(encoder, prompts, lengths))


def wrong_embeddings(
    encoder: PreTrainedModel, golden: Tensors
) -> Iterator[tuple[str, torch.Tensor]]:
    """What one gets by a mistake."""
    prompts, lengths = golden["prompts"], golden["lengths"]
    yield "the token before the last", embed(encoder, prompts, lengths - 1)
    yield (
        "the whole of a short prompt's row",
        embed(encoder, prompts, lengths.amax().expand(len(lengths))),
    )
    without_norm = copy.deepcopy(encoder)
    torch.nn.init.ones_(without_norm.norm.weight)
    yield "no final norm", embed(without_norm, prompts, lengths)
