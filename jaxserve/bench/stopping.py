"""Measurements that a signal stops, so that what was measured so far can be reported."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any

from jaxserve.interrupts import interrupts_kept

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ran_to_its_end(work: Coroutine[Any, Any, None]) -> bool:
    """Run a measurement; return False, with a word on standard error, if a signal stopped it."""
    try:
        with interrupts_kept():
            asyncio.run(_stoppable(work))
    except asyncio.CancelledError:
        print("interrupted", file=sys.stderr)
        return False
    return True


async def _stoppable(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await task
