"""What tuning needs of the rest of hone, and what it hands out: the seams, and the values that cross them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hone.tuning.inputs import InputSet
from hone.tuning.signatures import Signature
from hone.types import Array, Engine, TensorSpec


class VersionRef(NamedTuple):
    """One load of a model version. `graph` is the fingerprint of graph and weights: what a specialization belongs to,
    so that a reload with another graph is another reference and a mere change of configuration is not."""

    model: str
    version: int
    graph: str


@dataclass(frozen=True, eq=False)
class TunableVersion:
    """A served version as the tuner sees it. `inputs` and `outputs` are the baseline engine's."""

    ref: VersionRef
    path: Path
    baseline: Engine
    max_batch_size: int
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Of the accelerator named `tvm`."""
    samples: Callable[[], Sequence[InputSet]] = lambda: ()
    """Real inputs: warm-up data, and captured requests where capture is on. Called on the tuner's thread."""
    graph_level: int = 0
    """How the baseline's session is made, so that the child's is the same."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.baseline.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.baseline.outputs


class ServedModels(Protocol):
    """What is served now. Thread-safe."""

    def tunable(self) -> Sequence[TunableVersion]:
        """The versions that answer requests on a device of the tuner's, in a snapshot. Cheap: called every second."""


@dataclass(frozen=True, slots=True)
class Specialization:
    """A loaded and warmed engine, and what it is for: batches of `min_rows` to the signature's rows, padded up."""

    device: str
    """Digest of the device key: it runs on devices of this kind."""
    signature: Signature
    engine: Engine
    artifact: str
    """Digest of the artifact."""
    min_rows: int
    """Equal to the signature's rows where padding was not measured to be faster; 0 where the model does not batch."""


class Promotion(Protocol):
    """What serving runs. Thread-safe; none of these waits for an execution."""

    def promote(
        self, ref: VersionRef, specializations: Sequence[Specialization]
    ) -> Mapping[tuple[str, Signature], int] | None:
        """Make them current, all in one step, each in place of what ran its signature on its kind of device; takes
        their engines over. The generation of each, by device and signature (numbers of one version never repeat, and
        0 is the baseline); None, with the engines still the caller's, if the version is no longer served."""

    def roll_back(self, ref: VersionRef, generation: int) -> bool:
        """Return what this generation runs to the generation before it, or the baseline. False if it is not current."""

    def lease(self, ref: VersionRef, generation: int = 0) -> AbstractContextManager[bool]:
        """While inside, the version's baseline and that generation stay open; False where either is gone already."""


class Watcher(Protocol):
    """What serving tells of generations that it runs. Called on executor threads: returns at once."""

    def failed(self, ref: VersionRef, generation: int, reason: str) -> None:
        """An execution of the generation failed where the baseline did not."""

    def wants_sample(self, ref: VersionRef, generation: int) -> bool:
        """Whether `sampled` may be called for this execution; cheap, and False nearly always."""

    def sampled(
        self, ref: VersionRef, generation: int, inputs: Mapping[str, Array], outputs: Mapping[str, Array]
    ) -> None:
        """Inputs and outputs of an execution. The arrays are the watcher's: views that others reuse are copied first.
        Rows added to fill a batch are not part of them."""


class TuningControl(Protocol):
    """What front ends offer of tuning. Thread-safe."""

    def status(self, model: str, version: str = "") -> dict[str, Any]:
        """State, progress, buckets and history. Raises NotFound."""

    def act(self, model: str, version: str, action: str) -> None:
        """`start`, `pause`, `cancel`, `roll_back` or `pin_baseline`; takes effect soon after. Raises NotFound, and
        InvalidRequest for another action."""


class EngineLoader(Protocol):
    """Loads an artifact for this process. Raises HoneError; nothing is left mapped then."""

    def __call__(self, artifact: str, version: TunableVersion, /) -> Engine: ...
