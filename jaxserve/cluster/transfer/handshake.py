"""What two servers must have in common before keys and values of one are of use to the other."""

from dataclasses import dataclass
from typing import Any

from jaxserve.cluster.compatibility import Facts, difference
from jaxserve.cluster.transfer.ticket import TransferError
from jaxserve.cluster.v1 import cluster_pb2
from jaxserve.cluster.v1 import prefill_pb2 as pb

PROTOCOL = 1  # raised with every change that the other side has to know of
STAGE = "prefill"
TRANSPORT = "grpc"  # Fetch; an older release may have another one, and is refused


@dataclass(frozen=True)
class Handshake:
    """One side's.

    model: what has to be the same of it, see `facts_of_model`. stored: the dtype of this side's
    pages, as pieces have it. taken: dtypes of pieces that this side can make pages of.
    """

    model: Facts
    stored: str
    taken: tuple[str, ...]

    @property
    def facts(self) -> Facts:
        return {"the protocol": str(PROTOCOL)} | self.model

    def fields(self) -> dict[str, Any]:
        """Of a PrefillRequest or WatchRequest."""
        facts = cluster_pb2.Facts(
            stage=STAGE, names=list(self.facts), values=list(self.facts.values())
        )
        return {"facts": facts, "dtypes": self.taken, "transports": (TRANSPORT,)}

    def check(self, request: pb.PrefillRequest | pb.WatchRequest) -> None:
        """TransferError FAILED_PRECONDITION with the first difference and what both have, in the
        caller's words.
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
                f"--transport: pieces travel by {TRANSPORT} there, and by {transports} here",
            )
