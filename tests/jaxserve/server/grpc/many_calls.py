"""python -m tests.jaxserve.server.grpc.many_calls ADDRESS CALLS: makes all calls at once.

They share one connection. Prints the number of calls by status, as JSON; a refusal without an
ErrorInfo or a hint has "BARE" before its status.
"""

import asyncio
import json
import sys
from collections import Counter

from grpc import aio

from jaxserve.v1.common_pb2 import SamplingParams
from jaxserve.v1.inference_pb2 import GenerateRequest
from jaxserve.v1.inference_pb2_grpc import InferenceServiceStub


async def main(address: str, calls: int) -> None:
    async with aio.insecure_channel(address, options=[("grpc.enable_retries", 0)]) as channel:
        stub = InferenceServiceStub(channel)
        found = Counter(await asyncio.gather(*(status_of(stub) for _ in range(calls))))
        print(json.dumps(found))


async def status_of(stub: InferenceServiceStub) -> str:
    request = GenerateRequest(text="x", sampling=SamplingParams(max_tokens=1))
    try:
        await stub.Generate(request, timeout=300)
    except aio.AioRpcError as error:
        trailers = dict(error.trailing_metadata() or ())
        has_hint = int(str(trailers.get("grpc-retry-pushback-ms", -1))) > 0
        is_whole = "grpc-status-details-bin" in trailers and has_hint
        return error.code().name if is_whole else f"BARE {error.code().name}"
    return "OK"


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
