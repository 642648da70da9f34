"""Check that keys and values that one server computes are of use to another."""

from dataclasses import dataclass
from typing import Any

from jaxserve.cluster.compatibility import Facts, difference
from jaxserve.cluster.transfer.ticket import TransferError
from jaxserve.cluster.v1 import cluster_pb2
from jaxserve.cluster.v1 import prefill_pb2 as pb

PROTOCOL = 1  # raised with every change that the other side has to know of
STAGE = "prefill"
# Segments are fetched by TransferService.Fetch. An older release could be started with another
# transport, and announces only that one: it is refused in words instead of failing at every fetch.
TRANSPORT = "grpc"


@dataclass(frozen=True)
class Handshake:
    """Statement of one server about itself.

    `model` has the facts that must be equal, see `facts_of_model`. `stored` is the dtype of this
    side's pages, as segments have it. `taken` has the dtypes of segments from which this side can
    make pages.
    """

    model: Facts
    stored: str
    taken: tuple[str, ...]

    @property
    def facts(self) -> Facts:
        return {"the protocol": str(PROTOCOL)} | self.model

    def fields(self) -> dict[str, Any]:
        """Return the fields of a PrefillRequest or WatchRequest that state this handshake."""
        facts = cluster_pb2.Facts(
            stage=STAGE, names=list(self.facts), values=list(self.facts.values())
        )
        return {"facts": facts, "dtypes": self.taken, "transports": (TRANSPORT,)}

    def check(self, request: pb.PrefillRequest | pb.WatchRequest) -> None:
        """Raise TransferError FAILED_PRECONDITION with the first difference and both values.

        The text is read by the caller: "here" is the caller's side, "there" this one.
        """
        callers = dict(zip(request.facts.names, request.facts.values, strict=False))
        if problem := difference(callers, self.facts):
            raise TransferError("FAILED_PRECONDITION", f"the two servers differ in {problem}")
        if self.stored not in request.dtypes:
            taken = ", ".join(request.dtypes) or "nothing"
            raise TransferError(
                "FAILED_PRECONDITION",
                f"--kv: pages hold {self.stored} there, and those here are made of {taken}: "
                f"never of fewer digits",
            )
        if TRANSPORT not in request.transports:
            transports = ", ".join(request.transports) or "nothing"
            raise TransferError(
                "FAILED_PRECONDITION",
                f"the two servers differ in the transport of pieces: {TRANSPORT} there, "
                f"{transports} here (run the same release of jaxserve on both)",
            )
