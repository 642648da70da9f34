"""Which experts a model of transformers chose, with what weights, and how far from ties each choice
was.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch  # pyright: ignore[reportMissingImports]

ROUTERS = ("topkrouter", "hunyuanmoev1gate")  # ends of the names of routers' classes


@dataclass(frozen=True)
class Routing:
    """What one router answered, call by call: logits [n, E], weights [n, X] and ids [n, X] of n
    tokens.
    """

    router: torch.nn.Module
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def record(
        self, _module: torch.nn.Module, _args: object, answer: tuple[torch.Tensor, ...]
    ) -> None:
        logits, weights, ids = answer
        self.calls.append((logits, weights, ids))


@contextmanager
def recorded(model: torch.nn.Module) -> Iterator[list[Routing]]:
    """While the block runs: the answers of every router, in the order of the layers; none in a
    dense model.
    """
    for block in model.modules():  # MiniMax M2 and LFM2 have the correction beside the router
        bias = getattr(block, "e_score_correction_bias", getattr(block, "expert_bias", None))
        if hasattr(block, "gate") and bias is not None:
            object.__setattr__(block.gate, "e_score_correction_bias", bias)
    routings = [
        Routing(module)
        for module in model.modules()
        if type(module).__name__.lower().endswith(ROUTERS)
    ]
    hooks = [routing.router.register_forward_hook(routing.record) for routing in routings]
    yield routings
    for hook in hooks:
        hook.remove()


def by_weight(weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both [n, X], the largest weight first: the topk of transformers need not be sorted."""
    weights, order = weights.sort(dim=-1, descending=True)
    return weights, ids.gather(-1, order)


def chosen_experts(routings: list[Routing], batch: int) -> dict[str, torch.Tensor]:
    """`experts` and `expert_weights` [M, B, tokens, X] of the M MoE layers; nothing for a dense
    model.
    """
    layers = []
    for routing in routings:
        calls = [by_weight(weights, ids) for _, weights, ids in routing.calls]
        columns = zip(*calls, strict=True)
        layers.append(
            [torch.cat([x.view(batch, -1, x.shape[-1]) for x in column], 1) for column in columns]
        )
    if not layers:
        return {}
    weights, experts = (torch.stack(column) for column in zip(*layers, strict=True))
    return dict(experts=experts, expert_weights=weights)


def in_groups(scores: torch.Tensor, groups: int) -> torch.Tensor:
    return scores.view(len(scores), groups, -1)


def choice_scores(router: torch.nn.Module, logits: torch.Tensor) -> torch.Tensor:
    """[n, E]: what the router takes the largest of."""
    if hasattr(router, "moe_statics"):  # ERNIE 4.5
        return logits.softmax(-1) + router.moe_statics.e_score_correction_bias
    if hasattr(router, "e_score_correction_bias"):
        return logits.sigmoid() + router.e_score_correction_bias
    return logits if type(router).__name__ == "GptOssTopKRouter" else logits.softmax(-1)


def group_scores(router: torch.nn.Module, scores: torch.Tensor) -> torch.Tensor | None:
    """[n, groups]: what the router takes the largest groups of, if it chooses groups first
    (DeepSeek).
    """
    if (getattr(router, "num_group", None) or 1) == 1 or getattr(
        router, "topk_method", None
    ) == "greedy":
        return None
    best = 2 if hasattr(router, "e_score_correction_bias") else 1
    return in_groups(scores, router.num_group).topk(best, dim=-1).values.sum(-1)


def gap_below(scores: torch.Tensor, chosen: int) -> torch.Tensor:
    """[n]: from the last chosen of the scores [n, any] to the first that was not."""
    largest = scores.topk(chosen + 1, dim=-1).values
    return largest[:, -2] - largest[:, -1]


def in_chosen_groups(
    router: torch.nn.Module, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores [n, E], -inf outside the groups that are chosen, and by what gap [n] these were;
    infinite without.
    """
    groups = group_scores(router, scores)
    if groups is None:
        return scores, torch.full((len(scores),), torch.inf)
    chosen = groups.topk(router.topk_group, dim=-1).indices
    others = torch.ones_like(groups, dtype=torch.bool).scatter(1, chosen, False)
    scores = (
        in_groups(scores, router.num_group).masked_fill(others[..., None], -torch.inf).flatten(1)
    )
    return scores, gap_below(groups, router.topk_group)


def smallest_gap(routings: list[Routing]) -> float:
    """Of any choice of experts, of groups, and of the order by weight; infinite for a dense model.

    Computed from the logits alone, and so a second opinion on the ids: an error if they are not the
    largest scores.
    """
    gaps = [torch.tensor([torch.inf])]
    for routing in routings:
        for logits, weights, ids in routing.calls:
            scores, group_gap = in_chosen_groups(
                routing.router, choice_scores(routing.router, logits)
            )
            if not torch.equal(
                scores.topk(ids.shape[-1], dim=-1).indices.sort().values, ids.sort().values
            ):
                raise SystemExit(
                    f"{type(routing.router).__name__} chose otherwise than by the largest scores"
                )
            order_gap = -by_weight(weights, ids)[0].diff(dim=-1).flatten()
            gaps += [group_gap, gap_below(scores, ids.shape[-1]), order_gap]
    return torch.cat(gaps).min().item()
