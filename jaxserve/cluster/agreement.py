"""Agreement of the hosts of a pod on what they have loaded: the engine, and every weight."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jaxserve.checkpoints.hub.names import HubModel
from jaxserve.checkpoints.identity import identity
from jaxserve.cluster.compatibility import Facts, facts_of_engine, facts_of_model
from jaxserve.config import EngineConfig
from jaxserve.loading.digests import WeightDigests
from jaxserve.models.spec import ModelSpec

if TYPE_CHECKING:
    from jaxserve.cluster.bootstrap import Pod

DIGESTS = "the digests of the weights"
READS_ALL = (
    "The hosts read different files: host 0 reads the weights of all of them, to compare them (not "
    "needed where they mount one disk, or have copies of a folder of jaxserve convert)"
)


class LoadedModel(Protocol):
    """A loaded model, by what the hosts compare; see jaxserve.loading.folder.Model."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> str: ...

    @property
    def weights(self) -> str: ...


def digests_to_compare(pod: "Pod", model: Path | HubModel) -> WeightDigests | None:
    """Return what adds up digests of the weights; None where they need no comparison.

    They need none where all hosts read the same files, by `identity`. Elsewhere the leader reads
    the parts of all hosts, since no other part of a mesh may have the weights that one of them
    holds. Every host calls this, before it loads.
    """
    if pod.all_same("files", partial(identity, model)):
        return None
    return WeightDigests(all_hosts=pod.leads)


def agree_on_engine(
    pod: "Pod", model: LoadedModel, config: EngineConfig, digests: WeightDigests | None
) -> None:
    """Wait until all hosts have the same engine and the same weights.

    Args:
        digests: Result of `digests_to_compare`.

    Raises:
        ConfigError: The hosts differ; all of them raise it, with the first difference.
    """
    of_model = facts_of_model(model.spec, model.dtype, model.weights)
    pod.agree("engine", lambda: facts_of_engine(of_model, config))
    if digests:
        _agree_on_weights(pod, digests)


def _agree_on_weights(pod: "Pod", digests: WeightDigests) -> None:
    def judge(host: int, theirs: Facts) -> str | None:
        tensor = digests.first_difference(theirs[DIGESTS], host)
        return tensor and f"the weight {tensor} (give all hosts the same checkpoint)"

    pod.agree("weights", lambda: {DIGESTS: digests.text(pod.host)}, judge)
