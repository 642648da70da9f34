"""Check that keys and values that one server computes are of use to another."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxserve.cluster.compatibility import Facts, difference, digest
from jaxserve.cluster.transfer.ticket import TransferError
from jaxserve.cluster.v1 import cluster_pb2
from jaxserve.cluster.v1 import prefill_pb2 as pb
from jaxserve.loading.digests import WeightDigests

PROTOCOL = 3  # raised with every change that the other side has to know of
STAGE = "prefill"
WEIGHTS = "the weights"


@dataclass(frozen=True)
class Handshake:
    """Statement of one server about itself.

    `model` has the facts that must be equal, see `facts_of_model`, and `weights` the digests that
    must be. `page_dtype` is the dtype of this side's pages, as segments have it. `accepted_dtypes`
    are those of segments from which this side can make pages.
    """

    model: Facts
    weights: WeightDigests
    page_dtype: str
    accepted_dtypes: tuple[str, ...]

    @cached_property
    def facts(self) -> Facts:
        return {"the protocol": str(PROTOCOL), **self.model, WEIGHTS: digest(self.weights.text())}

    def watch_fields(self) -> dict[str, Any]:
        """Return the fields of a WatchRequest that state this handshake."""
        return self.fields() | {"weight_digests": self.weights.text()}

    def fields(self) -> dict[str, Any]:
        """Return the fields of a PrefillRequest that state this handshake."""
        facts = cluster_pb2.Facts(
            stage=STAGE, names=list(self.facts), values=list(self.facts.values())
        )
        return {"facts": facts, "dtypes": self.accepted_dtypes}

    def check(self, request: pb.PrefillRequest | pb.WatchRequest) -> None:
        """Raise TransferError FAILED_PRECONDITION with the first difference and both values.

        The text is read by the caller: "here" is the caller's side, "there" this one.
        """
        names = request.facts.names
        values = request.facts.values
        if len(names) != len(values):
            raise TransferError(
                "INVALID_ARGUMENT",
                f"facts have {len(names)} names and {len(values)} values; each name needs one",
            )
        theirs = dict(zip(names, values, strict=True))
        if problem := difference(theirs, self.facts):
            differ_in_weights = theirs | {WEIGHTS: self.facts[WEIGHTS]} == self.facts
            if differ_in_weights and isinstance(request, pb.WatchRequest):
                tensor = self.weights.first_difference(request.weight_digests)
                problem = f"the weight {tensor}" if tensor else problem
            raise TransferError("FAILED_PRECONDITION", f"the two servers differ in {problem}")
        if self.page_dtype not in request.dtypes:
            accepted = " or ".join(request.dtypes) or "nothing"
            raise TransferError(
                "FAILED_PRECONDITION",
                f"pages there hold {self.page_dtype}, and pages here can be made from {accepted} "
                f"(choose the same --kv on both servers)",
            )
