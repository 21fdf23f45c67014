"""The served versions as the tuner sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from hone.engines.onnxruntime import OnnxRuntimeEngine
from hone.engines.placed import PlacedEngine
from hone.errors import HoneError
from hone.protos import config_pb
from hone.repository import narrowed, warmup_samples
from hone.serving.model import ServedModel, num_instances
from hone.serving.registry import ModelRegistry
from hone.specialization import CPU
from hone.tuning.inputs import InputSet
from hone.tuning.ports import TunableVersion
from hone.types import Engine

#: Name of the accelerator in `optimization.execution_accelerators` whose parameters are tuning's.
ACCELERATOR = "tvm"


class ServedVersions:
    """See `ports.ServedModels`. The same version of a model is the same object from one look to the next."""

    def __init__(self, registry: ModelRegistry, precisions: Mapping[str, str] | None = None) -> None:
        """`precisions`: what models that say nothing have on a kind of device, where it is not float32."""
        self._registry = registry
        self._precisions = precisions or {}
        self._known: WeakKeyDictionary[ServedModel, TunableVersion] = WeakKeyDictionary()

    def tunable(self) -> Sequence[TunableVersion]:
        return [self._version(model) for model in self._registry.served()]

    def _version(self, model: ServedModel) -> TunableVersion:
        known = self._known.get(model)
        if known is None:
            known = self._known[model] = TunableVersion(
                ref=model.ref,
                path=model.definition.versions[model.version],
                baseline=model.slot.baseline.engine,
                max_batch_size=model.config.max_batch_size,
                own_parameters={kind: self._parameters(model, kind) for kind, _ in model.places},
                samples=_Samples(model),
                graph_level=model.config.optimization.graph.level,
                kinds=frozenset(kind for kind, _ in model.places),
                baseline_gpu=_gpu(model.slot.baseline.engine),
                baseline_threads=_num_threads(model.slot.baseline.engine),
                num_instances=num_instances(model.config),
                served_inputs=narrowed(model.slot.baseline.engine.inputs, model.config),
            )
        return known

    def _parameters(self, model: ServedModel, kind: str) -> dict[str, str]:
        parameters = accelerator_parameters(model.config, gpu=kind != CPU)
        if kind in self._precisions:
            parameters.setdefault("precision", self._precisions[kind])
        return parameters


def _num_threads(engine: Engine) -> int:
    engine = engine.first if isinstance(engine, PlacedEngine) else engine
    return engine.num_threads if isinstance(engine, OnnxRuntimeEngine) else 1


def _gpu(engine: Engine) -> int | None:
    """Of those that the baseline runs on, the first: that is where the child measures."""
    return engine.first_ordinal if isinstance(engine, PlacedEngine) else None


class _Samples:
    """Warm-up data of a model that holds real values; made-up data is the gate's own business."""

    def __init__(self, model: ServedModel) -> None:
        self._definition = model.definition
        self._config = model.config
        self._inputs = model.slot.baseline.engine.inputs

    def __call__(self) -> Sequence[InputSet]:
        if not any(tensor.input_data_file for sample in self._config.model_warmup for tensor in sample.inputs.values()):
            return ()
        try:
            samples = warmup_samples(self._definition, self._config, self._inputs)
        except HoneError:
            return ()  # its files have changed since the model was loaded, which polling will see
        return [InputSet(sample.name, dict(sample.inputs)) for sample in samples]


def accelerator_parameters(config: config_pb.ModelConfig, *, gpu: bool = False) -> dict[str, str]:
    """Parameters of the accelerator named `tvm` for instances on the CPU or on GPUs; none where the configuration has
    no such accelerator."""
    accelerators = config.optimization.execution_accelerators
    for accelerator in accelerators.gpu_execution_accelerator if gpu else accelerators.cpu_execution_accelerator:
        if accelerator.name == ACCELERATOR:
            return dict(accelerator.parameters)
    return {}
