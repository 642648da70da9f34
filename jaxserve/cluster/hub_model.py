"""Model of a pod: all hosts load the commit that host 0 has found on the hub."""

from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.checkpoints.hub.names import HubModel, hub_model
from jaxserve.flag_errors import flag_error

if TYPE_CHECKING:
    from jaxserve.cluster.bootstrap import Pod


def model_of_pod(pod: "Pod", given: Path | HubModel) -> Path | HubModel:
    """Return the model that this host loads: a folder as it was given, or one of the hub.

    Every host calls it once, after it has joined. Raises ConfigError on a host whose flag is a
    folder or another model where host 0 has one of the hub, or the reverse, since hosts load in
    step. Raises CheckpointError on host 0 if there is no such model.
    """
    model = hub_model(given)
    told = pod.told(lambda: str(_found(model)) if model else "")
    theirs = hub_model(told)
    if (model and model.repo) != (theirs and theirs.repo):
        problem = (
            f"the leader has {theirs.repo if theirs else 'a folder'} (give all hosts the same)"
        )
        raise flag_error("--model", given, problem)
    return theirs or given


def _found(model: HubModel) -> HubModel:
    from jaxserve.checkpoints.hub.lookup import find  # late: it imports huggingface_hub

    return find(model).model
