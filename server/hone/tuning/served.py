"""The served versions as the tuner sees them."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from hone.errors import HoneError
from hone.protos import config_pb
from hone.repository import warmup_samples
from hone.serving.model import ServedModel
from hone.serving.registry import ModelRegistry
from hone.tuning.inputs import InputSet
from hone.tuning.ports import TunableVersion

#: Name of the accelerator in `optimization.execution_accelerators` whose parameters are tuning's.
ACCELERATOR = "tvm"


class ServedVersions:
    """See `ports.ServedModels`. The same version of a model is the same object from one look to the next."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry
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
                parameters=accelerator_parameters(model.config),
                samples=_Samples(model),
                graph_level=model.config.optimization.graph.level,
            )
        return known


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


def accelerator_parameters(config: config_pb.ModelConfig) -> dict[str, str]:
    """Parameters of the CPU accelerator named `tvm`; none where the configuration has no such accelerator."""
    for accelerator in config.optimization.execution_accelerators.cpu_execution_accelerator:
        if accelerator.name == ACCELERATOR:
            return dict(accelerator.parameters)
    return {}
