"""One event loop in one thread, for sandboxes that outlive the event loop of their caller.

GRPO's plugins may gather every turn in a fresh `asyncio.run`; a connection made in one of those loops is dead in the next. So connections live here, and
callers of any loop wait for them. It is also the thread that spawns: the kernel's parent-death signal follows the *thread*, and this one
lives as long as the process.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}


def background_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process, started at the first call; a forked child gets its own."""
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            _loops.clear()
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="sandboxes", daemon=True).start()
    return loop


async def in_background(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` in the background loop from any loop. Cancelling the wait cancels the work."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, background_loop()))
