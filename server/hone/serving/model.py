"""A model version in memory, and the check that a request fits it.

`ServedModel` is the lease that front ends hold while they decode, run and answer: a retired version closes when its
last lease ends. Leases begin and end on the event loop, so their count needs no lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

from hone import errors
from hone.errors import InvalidRequest, ServerStopping
from hone.metrics import ModelStatistics
from hone.protos import config_pb
from hone.repository import ModelDefinition, protocol_datatype, to_client, to_engine
from hone.serving.batcher import BatchPolicy, DirectScheduler, DynamicBatcher, Scheduler
from hone.serving.brief import BriefExecutions
from hone.serving.choice import chosen_engine
from hone.serving.execution import Pending, ReplyFuture
from hone.serving.executor import Completions, DeviceExecutor
from hone.serving.observation import Observation
from hone.serving.slot import Slot
from hone.specialization import CPU, Observers, VersionRef
from hone.types import Array, Engine, InferRequest, ModelMetadata, Shape, TensorMetadata

#: Stands for the graph's shape of a tensor that the graph does not tell.
_UNKNOWN: Shape = (-1,)


class _Tensor:
    """One input or output of the configuration; `dims` and shapes are without the batch axis unless said otherwise."""

    __slots__ = ("_graph_shape", "_plain", "_spec", "datatype", "dims", "name", "optional")

    def __init__(
        self, spec: config_pb.ModelInput | config_pb.ModelOutput, graph_shape: Shape, *, optional: bool = False
    ) -> None:
        self.name: str = spec.name
        self.datatype = protocol_datatype(spec.data_type)
        self.dims: Shape = tuple(spec.dims)
        self.optional = optional
        self._spec = spec
        self._graph_shape = graph_shape
        # Most tensors look the same to client and engine: those skip the conversions.
        self._plain = not spec.HasField("reshape") and bool(graph_shape)

    def fits(self, shape: Shape) -> bool:
        dims = self.dims
        if shape == dims:
            return True
        if len(shape) != len(dims):
            return False
        for want, got in zip(dims, shape, strict=True):  # noqa: SIM110 (the hot path: a loop is quicker than all)
            if want not in (-1, got):
                return False
        return True

    def to_engine(self, array: Array, *, batching: bool) -> Array:
        """The same memory in the shape that the engine takes; batch axis included on both sides."""
        if self._plain:
            return array
        return array.reshape(to_engine(array.shape, self._spec, self._graph_shape, batching=batching))

    def to_client(self, shape: Shape, *, batching: bool) -> Shape:
        return shape if self._plain else to_client(shape, self._spec, batching=batching)


class ServedModel:
    """One version of a model, ready to answer."""

    def __init__(
        self,
        *,
        definition: ModelDefinition,
        version: int,
        config: config_pb.ModelConfig,
        engine: Engine,
        statistics: ModelStatistics,
        completions: Completions,
        observers: Observers = Observers(),  # noqa: B008 (frozen, and empty)
        generation_numbers: Iterator[int] | None = None,
        gpu_kinds: Sequence[str] = (),
    ) -> None:
        """`gpu_kinds` are the kinds of the server's GPUs, by ordinal."""
        name = definition.name
        self.name = name
        self.loop = loop = asyncio.get_running_loop()
        self.definition = definition
        self.version = version
        self.version_text = str(version)
        self.config = config
        self.fingerprint = fingerprint_of(definition, version)
        self.statistics = statistics
        self.batching = config.max_batch_size > 0
        self._labels = definition.labels
        graph_shapes = {spec.name: spec.shape for spec in (*engine.inputs, *engine.outputs)}
        self._inputs = {
            spec.name: _Tensor(spec, graph_shapes.get(spec.name, _UNKNOWN), optional=spec.optional)
            for spec in config.input
        }
        self._outputs = {spec.name: _Tensor(spec, graph_shapes.get(spec.name, _UNKNOWN)) for spec in config.output}
        self._output_names = tuple(self._outputs)
        self._num_required = sum(not tensor.optional for tensor in self._inputs.values())
        self.ref = VersionRef(name, version, definition.version_fingerprints[version])
        self.slot = Slot(engine, tuple(self._inputs), batching=self.batching, numbers=generation_numbers)
        observation = Observation(
            self.ref,
            [(tensor.name, tensor.datatype) for tensor in self._inputs.values()],
            batching=self.batching,
            observers=observers,
        )
        self.places = places_of(config, gpu_kinds)
        self._executor = DeviceExecutor(
            f"{name}:{version}",
            len(self.places),
            completions,
            activity=observers.activity,
            devices=self.places,
            marks=observers.running,
        )
        # Where the baseline is steady, so is what replaces it: both compute the same graph.
        on_cpu = all(kind == CPU for kind, _ in self.places)
        brief = BriefExecutions() if engine.is_steady and on_cpu else None
        self.scheduler: Scheduler = (
            DynamicBatcher(
                name, BatchPolicy.from_config(config), self.slot, observation, self._executor, statistics, loop, brief
            )
            if self.batching and config.HasField("dynamic_batching")
            else DirectScheduler(self.slot, observation, self._executor, statistics, brief)
        )
        self._leases = 0
        self._retired = False
        self._drained = asyncio.Event()
        prefix = (-1,) if self.batching else ()
        self.metadata = ModelMetadata(
            name=name,
            versions=(self.version_text,),
            platform=config.platform or config.backend,
            inputs=tuple(
                TensorMetadata(t.name, t.datatype, prefix + t.dims, t.optional) for t in self._inputs.values()
            ),
            outputs=tuple(TensorMetadata(t.name, t.datatype, prefix + t.dims) for t in self._outputs.values()),
        )

    # --- lease

    def acquire(self) -> ServedModel:
        """Begin a lease; leave it by `with`. Raises ServerStopping once the version is retired."""
        if self._retired:
            raise ServerStopping(self.name)
        self._leases += 1
        return self

    def __enter__(self) -> ServedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leases -= 1
        if self._retired and self._leases == 0:
            self._drained.set()

    @property
    def num_leases(self) -> int:
        return self._leases

    async def retire(self) -> None:
        """Take no new leases, wait for the present ones, then end the threads and close the engine."""
        self._retired = True
        if self._leases == 0:
            self._drained.set()
        await self._drained.wait()
        await self._executor.close()
        await asyncio.to_thread(self.slot.close)  # frees memory, which may take a while: of GPUs, it waits for them

    # --- requests

    def admit(self, request: InferRequest, future: ReplyFuture) -> Pending:
        """Check the request against the model and bring its arrays into the engine's shapes, without copying.

        Raises InvalidRequest in Triton's words (rows 15 to 25 of the error table).
        """
        given = request.inputs
        if len(given) != self._num_required or given.keys() != self._inputs.keys():
            self._check_names(given)
        batch_size = 0
        arrays: dict[str, Array] = {}
        key: list[Shape | None] = []
        for name, tensor in self._inputs.items():
            entry = given.get(name)
            if entry is None:
                key.append(None)  # optional: its presence is checked above
                continue
            if entry.datatype != tensor.datatype:
                raise errors.wrong_datatype(self.name, name, entry.datatype, tensor.datatype)
            shape = entry.shape
            if self.batching:
                if not shape:
                    raise errors.no_batch_dimension(self.name, name)
                if not arrays:
                    batch_size = shape[0]
                elif shape[0] != batch_size:
                    raise errors.different_batch_sizes(self.name, name)
                shape = shape[1:]
            if not tensor.fits(shape):
                expected = (-1, *tensor.dims) if self.batching else tensor.dims
                raise errors.wrong_shape(self.name, name, entry.shape, expected, batching=self.batching)
            array = arrays[name] = tensor.to_engine(entry.data, batching=self.batching)
            key.append(array.shape[1:] if self.batching else array.shape)
        if not self.batching:
            batch_size = 1
        if self.batching and not 0 < batch_size <= self.config.max_batch_size:
            if batch_size <= 0:
                raise InvalidRequest(f"inference request batch-size must be >= 1 for '{self.name}', got {batch_size}")
            raise errors.batch_too_large(self.name, self.config.max_batch_size, batch_size)
        names = self._output_names
        if request.outputs:
            names = tuple(output.name for output in request.outputs)
            self._check_outputs(names)
        choice = chosen_engine(request.parameters) if request.parameters else ""
        return Pending(request, arrays, batch_size, tuple(key), names, future, choice)

    def output_shape(self, name: str, array: Array) -> Shape:
        """The shape a client sees of an output of the engine."""
        return self._outputs[name].to_client(array.shape, batching=self.batching)

    def output_datatype(self, name: str) -> str:
        return self._outputs[name].datatype

    def labels(self, output: str) -> Sequence[str]:
        return self._labels.get(output, ())

    def _check_names(self, given: Iterable[str]) -> None:
        names = list(given)
        for name in names:
            if name not in self._inputs:
                raise errors.unexpected_input(self.name, name)
        missing = [t.name for t in self._inputs.values() if not t.optional and t.name not in names]
        if missing:
            num_optional = len(self._inputs) - self._num_required
            raise errors.missing_inputs(self.name, self._num_required, num_optional, names, missing)

    def _check_outputs(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._outputs:
                raise errors.unexpected_output(self.name, name)
        if len(set(names)) != len(names):
            repeated = next(name for i, name in enumerate(names) if name in names[:i])
            raise errors.duplicate_tensor("output", repeated)


def places_of(config: config_pb.ModelConfig, gpu_kinds: Sequence[str] = ()) -> tuple[tuple[str, int], ...]:
    """Kind and ordinal of the device of each instance. A group on GPUs has its count of instances on each of them, in
    turns, so that the first requests are spread out."""
    places: list[tuple[str, int]] = []
    for group in config.instance_group:
        if group.kind == config_pb.ModelInstanceGroup.KIND_GPU:
            places += [(gpu_kinds[gpu], gpu) for _ in range(max(1, group.count)) for gpu in group.gpus]
        else:
            places += [(CPU, 0)] * max(1, group.count)
    return tuple(places) or ((CPU, 0),)


def num_instances(config: config_pb.ModelConfig) -> int:
    """Of those that share the CPU's threads; of a model on GPUs alone, those of one card."""
    gpu = config_pb.ModelInstanceGroup.KIND_GPU
    on_cpu = [group for group in config.instance_group if group.kind != gpu]
    return sum(max(1, group.count) for group in on_cpu or config.instance_group) or 1


def fingerprint_of(definition: ModelDefinition, version: int) -> str:
    """Changes with everything that a served version is made of: graph, weights, configuration, labels, warm-up data."""
    return f"{definition.version_fingerprints[version]}:{definition.config_fingerprint}"
