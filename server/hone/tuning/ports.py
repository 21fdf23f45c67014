"""What tuning needs of the rest of hone, and what it hands out: the seams, and the values that cross them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hone.specialization import Signature, Specialization, VersionRef
from hone.tuning.inputs import InputSet
from hone.types import Engine, TensorSpec


@dataclass(frozen=True, eq=False)
class TunableVersion:
    """A served version as the tuner sees it."""

    ref: VersionRef
    path: Path
    baseline: Engine
    max_batch_size: int
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Of the accelerator named `tvm`, for kinds of device that `own_parameters` does not name."""
    own_parameters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Kind of device, as executors call it -> parameters of the accelerator for it."""
    samples: Callable[[], Sequence[InputSet]] = lambda: ()
    """Real inputs: warm-up data, and captured requests where capture is on. Called on the tuner's thread."""
    graph_level: int = 0
    kinds: frozenset[str] | None = None
    """Kinds of device that its instances run on, by the name that executors have for them; None for all."""
    baseline_gpu: int | None = None
    """Ordinal of the GPU that the baseline runs on in the child; None for the CPU."""
    baseline_threads: int = 1
    """How the baseline's session is made, so that the child's is the same."""
    num_instances: int = 1
    """Executions that run side by side; they share the threads out among themselves."""
    served_inputs: tuple[TensorSpec, ...] | None = None
    """The baseline's inputs with what the configuration fixes of shapes that the graph leaves open."""

    def parameters_on(self, kind: str) -> Mapping[str, str]:
        """What tuning for a kind of device goes by, which is named as executors name it."""
        return self.own_parameters.get(kind, self.parameters)

    def threads_of(self, num_threads: int) -> int:
        """Of so many threads, those of one instance."""
        return max(1, num_threads // self.num_instances)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.baseline.inputs if self.served_inputs is None else self.served_inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.baseline.outputs


class ServedModels(Protocol):
    """What is served now. Thread-safe."""

    def tunable(self) -> Sequence[TunableVersion]:
        """The versions that answer requests on a device of the tuner's, in a snapshot. Cheap: called every second."""


class Promotion(Protocol):
    """What serving runs. Thread-safe; none of these waits for an execution."""

    def promote(self, ref: VersionRef, specializations: Sequence[Specialization]) -> Mapping[Signature, int] | None:
        """Make them current, all in one step, each in place of what ran its signature; takes their engines over. All
        are for one kind of device. The generation of each (numbers of one version never repeat, and 0 is the
        baseline); None, with the engines still the caller's, if the version is no longer served."""

    def roll_back(self, ref: VersionRef, generation: int) -> bool:
        """Return what this generation runs to the generation before it, or the baseline. False if it is not current."""

    def lease(self, ref: VersionRef, generation: int = 0) -> AbstractContextManager[bool]:
        """While inside, the version's baseline and that generation stay open; False where either is gone already."""


class EngineLoader(Protocol):
    """Loads an artifact for this process. Raises HoneError; nothing is left mapped then."""

    def __call__(self, artifact: str, device: str, version: TunableVersion, /) -> Engine:
        """`device` is the digest of the device key that the artifact was made for."""
