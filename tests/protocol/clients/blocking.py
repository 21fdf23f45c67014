"""An asyncio client by a blocking face, so that it can go through the same steps."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any


class Blocking:
    def __init__(self, client: Any, runner: asyncio.Runner) -> None:
        self.wrapped = client
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.wrapped, name)

        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            return self.wait(result) if inspect.isawaitable(result) else result

        return call

    def wait(self, awaitable: Any) -> Any:
        async def finish() -> Any:
            return await awaitable

        return self._runner.run(finish())
