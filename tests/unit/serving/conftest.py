"""A served model over the fake engine, with the real scheduler and executor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from hone.metrics import ModelStatistics
from hone.protos import config_pb
from hone.repository import ModelDefinition
from hone.serving.execution import Pending
from hone.serving.executor import Completions
from hone.serving.model import ServedModel
from hone.specialization import Observers
from hone.types import Array, InferInput, InferRequest, RequestedOutput
from tests.unit.serving.fakes import FakeEngine

BATCHING = """
name: "m" platform: "onnxruntime_onnx" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: 4 } output { name: "OUT" data_type: TYPE_FP32 dims: 4 }
"""


class Served:
    """A model with shortcuts: `ask` submits a request and returns its pending."""

    def __init__(
        self,
        completions: Completions,
        config_text: str,
        engine: FakeEngine | None,
        observers: Observers,
        gpu_kinds: Sequence[str] = (),
    ) -> None:
        self.completions = completions
        self.engine = engine or FakeEngine()
        self.config = text_format.Parse(config_text, config_pb.ModelConfig())
        self.statistics = ModelStatistics("m", "1")
        self.model = ServedModel(
            definition=ModelDefinition(
                name="m",
                path=Path(),
                config=self.config,
                versions={1: Path()},
                fingerprint="all",
                version_fingerprints={1: "graph"},
                config_fingerprint="config",
                labels={},
            ),
            version=1,
            config=self.config,
            engine=self.engine,
            statistics=self.statistics,
            completions=completions,
            observers=observers,
            gpu_kinds=gpu_kinds,
        )

    def ask(self, array: Array, *, name: str = "IN", datatype: str = "FP32", **fields: object) -> Pending:
        pending = self.admit(array, name=name, datatype=datatype, **fields)
        self.model.scheduler.submit(pending)
        return pending

    def admit(self, array: Array, *, name: str = "IN", datatype: str = "FP32", **fields: object) -> Pending:
        request = request_of({name: (datatype, array)}, **fields)
        return self.model.admit(request, asyncio.get_running_loop().create_future())

    async def entered(self) -> None:
        """Wait until the engine has begun one more run."""
        assert await asyncio.to_thread(self.engine.entered.acquire, timeout=30)


def request_of(arrays: dict[str, tuple[str, Array]], outputs: tuple[str, ...] = (), **fields: object) -> InferRequest:
    inputs = {n: InferInput(n, datatype, a.shape, a) for n, (datatype, a) in arrays.items()}
    return InferRequest("m", "", "", inputs, [RequestedOutput(name) for name in outputs], **fields)  # type: ignore[arg-type]


def rows(number: int, value: float = 1.0, width: int = 4) -> Array:
    return np.full((number, width), value, np.float32)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Served]]:
    """Make served models; they are retired at the end."""
    made: list[Served] = []
    completions = Completions(asyncio.get_running_loop())

    def make(
        config_text: str = BATCHING,
        engine: FakeEngine | None = None,
        observers: Observers | None = None,
        gpu_kinds: Sequence[str] = (),
    ) -> Served:
        made.append(Served(completions, config_text, engine, observers or Observers(), gpu_kinds))
        return made[-1]

    yield make
    for served in made:
        served.engine.gate.set()
        await served.model.retire()
    completions.close()
