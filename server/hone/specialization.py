"""The values and seams by which tuning reaches what serves: signatures, specializations, and who watches them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from hone.types import Array, Engine, Shape, TensorSpec

#: The kind of device that every server has. Executors run the baseline, and specializations for their own kind.
CPU = "cpu"
#: Which device of its kind an executor's thread runs on, by CUDA's number; each thread sets its own when it starts.
DEVICE_ORDINAL: ContextVar[int] = ContextVar("device_ordinal", default=0)


class TensorShape(NamedTuple):
    name: str
    datatype: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Signature:
    """Names, datatypes and concrete shapes of the inputs of one execution, in the order of the names."""

    tensors: tuple[TensorShape, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, str, Shape]]) -> Signature:
        return cls(tuple(sorted(TensorShape(name, datatype, tuple(shape)) for name, datatype, shape in tensors)))

    @property
    def text(self) -> str:
        """For people and labels: `IN:FP32[1,4]`, several with a space between."""
        return " ".join(f"{t.name}:{t.datatype}[{','.join(map(str, t.shape))}]" for t in self.tensors)

    @property
    def shapes(self) -> dict[str, Shape]:
        return {tensor.name: tensor.shape for tensor in self.tensors}

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(*tensor) for tensor in self.tensors)

    @property
    def rows(self) -> int:
        """Items of the first axis, where all inputs agree on it; else 0."""
        firsts = {tensor.shape[0] if tensor.shape else 0 for tensor in self.tensors}
        return firsts.pop() if len(firsts) == 1 else 0

    def with_rows(self, rows: int) -> Signature:
        """The same with another batch size."""
        return Signature(tuple(t._replace(shape=(rows, *t.shape[1:])) for t in self.tensors))

    def fits(self, arrays: Mapping[str, Array]) -> bool:
        return {name: array.shape for name, array in arrays.items()} == self.shapes

    def to_json(self) -> list[list[Any]]:
        return [[tensor.name, tensor.datatype, list(tensor.shape)] for tensor in self.tensors]

    @classmethod
    def from_json(cls, told: Sequence[Sequence[Any]]) -> Signature:
        return cls.of((str(name), str(datatype), tuple(int(dim) for dim in dims)) for name, datatype, dims in told)


class VersionRef(NamedTuple):
    """One load of a model version. `graph` is the fingerprint of graph and weights: what a specialization belongs to,
    so that a reload with another graph is another reference and a mere change of configuration is not."""

    model: str
    version: int
    graph: str


@dataclass(frozen=True, slots=True)
class Specialization:
    """A loaded and warmed engine, and what it is for: batches of `min_rows` to the signature's rows, padded up."""

    signature: Signature
    engine: Engine
    artifact: str
    """Digest of the artifact."""
    min_rows: int
    """Equal to the signature's rows where padding was not measured to be faster; 0 where the model does not batch."""
    device: str = CPU
    """The kind of device that it runs on, by the name that executors have for it."""
    mark: int = 0
    """What threads note while they run it; see `RunningMarks`."""


class Watcher(Protocol):
    """What serving tells of generations that it runs. Called on executor threads: returns at once."""

    def failed(self, ref: VersionRef, generation: int, reason: str) -> None:
        """An execution of the generation failed; the baseline has answered it."""

    def declined(self, ref: VersionRef, generation: int) -> None:
        """The generation leaves an execution's inputs to the baseline, which answers it; nothing is wrong with it."""

    def wants_sample(self, ref: VersionRef, generation: int) -> bool:
        """Whether `sampled` may be called for this execution; cheap, and False nearly always. Generation 0, the
        baseline, is wanted where requests are captured."""

    def sampled(
        self, ref: VersionRef, generation: int, inputs: Mapping[str, Array], outputs: Mapping[str, Array]
    ) -> None:
        """Inputs and outputs of an execution, copied: the arrays are the watcher's. Rows added to fill a batch are not
        part of them."""


class ActivityMeter(Protocol):
    """Counts executions as they begin and end. Called on the event loop, for every one of them."""

    def started(self) -> None: ...

    def finished(self) -> None: ...


class Cells(Protocol):
    def __setitem__(self, index: int, value: int, /) -> None: ...


class RunningMarks(Protocol):
    """Where each thread notes what it runs, so that a crash can be held against the right one.

    A thread claims a cell when it starts; before it runs a specialization it writes the specialization's mark into
    `cells[cell]`, and 0 after. `cells` is looked up anew each time: it may be replaced."""

    cells: Cells

    def claim(self) -> int:
        """The index of a cell for the calling thread."""

    def release(self, cell: int, /) -> None: ...


class TrafficMeter(Protocol):
    """Learns what is asked for. Called on executor threads, once an execution."""

    def ran(self, model: str, version: int, signature: Signature, seconds: float, /) -> None:
        """One execution of this signature (batch size included) took so long in the engine."""


class TuningControl(Protocol):
    """What front ends offer of tuning. Thread-safe, and never blocks."""

    def status(self, model: str, version: str = "") -> dict[str, Any]:
        """State, progress, buckets and history, as docs/tuning.md has them. Raises NotFound."""

    def act(self, model: str, version: str, action: str) -> Future[None]:
        """`start`, `retune`, `pause`, `cancel`, `roll_back` or `pin_baseline`: it has taken effect when the future is
        done, which raises Unavailable where the model's tuning is off. Raises NotFound, and InvalidRequest for another
        action."""


@dataclass(frozen=True, slots=True)
class Observers:
    """Who is told of executions; each may be absent."""

    watcher: Watcher | None = None
    activity: ActivityMeter | None = None
    traffic: TrafficMeter | None = None
    running: RunningMarks | None = None
