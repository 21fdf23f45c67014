"""The tuned engine on NVIDIA GPUs: runs an artifact on TVM's runtime, without the `tvm` package.

A run copies inputs through pinned memory on a stream of its own, computes when it is the device's turn, and copies each
output once, into pinned memory that becomes the answer. While one instance computes, others copy: two instances keep a
card busy.

A kernel that breaks the GPU's context takes all engines of the process along. Who computed when it broke raises
CudaError, which is held against it; all others raise DeviceLost, which is not.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from hone.engines.cuda_device import CudaDevice
from hone.engines.cuda_runtime import CudaError
from hone.engines.tvm import (
    ConstantsSource,
    PackedWeights,
    Weight,
    first_line,
    read_parameters,
)
from hone.engines.tvm_artifact import MODULE_FILE, ArtifactManifest
from hone.engines.tvm_library import Library
from hone.errors import DeviceLost, EngineBusy, EngineError, InputsDeclined
from hone.specialization import DEVICE_ORDINAL
from hone.types import NUMPY_DTYPES, Array, TensorSpec

_log = logging.getLogger(__name__)

_INT32 = np.dtype(np.int32)
#: What a request's first run waits for others' captures, which take milliseconds.
_CAPTURE_SECONDS = 0.02


class TvmCudaEngine:
    """One artifact on one or more cards of its kind. Thread-safe but for `close`; each thread runs an instance of its
    own, on the card that the thread belongs to."""

    kind = "tvm"
    initializers: tuple[TensorSpec, ...] = ()
    is_steady = False

    def __init__(
        self,
        manifest: ArtifactManifest,
        library: Library,
        devices: Mapping[int, CudaDevice],
        weights: Mapping[int, list[Weight]],
    ) -> None:
        """`weights` by ordinal, as `main` takes them; every device has its own."""
        self.inputs = manifest.inputs
        self.outputs = manifest.outputs
        self._manifest = manifest
        self._library: Library | None = library
        self._devices = devices
        self._weights = dict(weights)

    @classmethod
    def load(
        cls,
        folder: Path,
        manifest: Mapping[str, Any],
        *,
        model: Path,
        kernels: Mapping[str, Path],
        constants: ConstantsSource,
        devices: Sequence[CudaDevice],
        packed: PackedWeights,
    ) -> TvmCudaEngine:
        """Load an artifact onto these devices: see `TvmEngine.load`, which it is like."""
        if not devices:
            raise ValueError("an engine needs a device")
        devices[0].cuda.check_not_lost()
        told = ArtifactManifest.from_fields(manifest)
        library = devices[0].tvm.libraries.open(folder / MODULE_FILE, told.kernels, kernels)
        weights = {d.ordinal: _pack(told, library.module, model, constants, packed, d) for d in devices}
        return cls(told, library, {device.ordinal: device for device in devices}, weights)

    def instantiate(self) -> TvmCudaInstance:
        """On the card of the calling thread; on the first where the thread belongs to none of the engine's."""
        if self._library is None:
            raise EngineError("the engine is closed")
        ordinal = DEVICE_ORDINAL.get()
        device = self._devices.get(ordinal) or next(iter(self._devices.values()))
        return TvmCudaInstance(self._manifest, self._library, device, self._weights[device.ordinal])

    def close(self) -> None:
        """Drops the code, and the weights that nobody else uses. Outputs handed out stay valid. Of a GPU that is lost
        nothing is dropped."""
        for device in self._devices.values():
            if device.cuda.lost:
                device.cuda.keep(self._library, self._weights)
                break
        else:
            for device in self._devices.values():
                device.bind()  # also has this thread free memory while another captures
            self._weights = {}
            for device in self._devices.values():
                device.tvm.clear_memory()
        self._library = None
        self._weights = {}


class TvmCudaInstance:
    """One virtual machine and one stream on a card; for one thread at a time."""

    def __init__(
        self, manifest: ArtifactManifest, library: Library, device: CudaDevice, weights: Sequence[Weight]
    ) -> None:
        device.cuda.check_not_lost()
        device.bind()
        self._device = device
        self._stream = stream = device.cuda.create_stream()
        #: What lies on the card: outlives the instance where the GPU is lost.
        self._held: list[Any] = [library]
        weakref.finalize(self, _let_go, device, stream, self._held).atexit = False
        self._library = library  # its code must not be loaded anew while this runs it
        self._machine = _virtual_machine(library.module, device)
        self._main = self._machine["main"]
        self._weights = list(weights)
        self._packed = tvm_ffi.convert([weight.tensor for weight in weights])
        self._inputs = manifest.inputs
        self._outputs = manifest.outputs
        self._returns_tuple, self._guarded = manifest.returns_tuple, manifest.guarded
        self._tensors = [device.empty(spec.shape, NUMPY_DTYPES[spec.datatype].name) for spec in manifest.inputs]
        self._held += [self._machine, self._main, self._packed, *self._tensors]
        self._staging = [device.pinned.take(_num_bytes(spec)) for spec in manifest.inputs]
        self._positions = {spec.name: at for at, spec in enumerate(manifest.outputs)}
        self._has_captured = False

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Run once. Inputs have exactly the shapes and dtypes that the engine tells. Raises EngineError; InputsDeclined
        for inputs that the baseline must answer, and EngineBusy, before the first run has been, while a model is loaded
        onto a GPU.

        The arrays returned are pinned memory of their own, which comes back for others when nobody looks at it.
        """
        for name in outputs:
            if name not in self._positions:
                raise EngineError(f"tvm: output '{name}' is unknown")
        arrays = [_checked(spec, inputs.get(spec.name)) for spec in self._inputs]
        with self._capturing():
            return self._run(arrays, outputs)

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """The first run captures what later ones replay."""
        if self._has_captured:
            yield
            return
        captures = self._device.captures
        if not captures.acquire(timeout=_CAPTURE_SECONDS):
            raise EngineBusy("tvm: a model is being loaded onto a GPU, which forbids the first run of another")
        try:
            yield
        finally:
            captures.release()
        self._has_captured = True

    def _run(self, arrays: Sequence[Array], outputs: Sequence[str]) -> list[Array]:
        device, stream = self._device, self._stream
        with _nobody_is_to_blame(device):
            device.bind()  # a thread may have instances on several cards
            for array, tensor, staging in zip(arrays, self._tensors, self._staging, strict=True):
                device.upload(array, tensor, staging, stream)
        with device.computing, device.launching_on(stream):
            device.cuda.check_not_lost()
            device.cuda.clear_error()  # what failed here before is not the next kernel's
            try:
                result = self._main(*self._tensors, self._packed)
            except Exception as problem:  # tvm-ffi turns errors of compiled code into many classes
                raise EngineError(f"tvm: {first_line(problem)}") from problem
            finally:
                device.cuda.synchronize(stream)
        results = list(result) if self._returns_tuple else [result]
        try:
            with _nobody_is_to_blame(device):
                return self._download(results, outputs)
        except DeviceLost:
            device.cuda.keep(results)
            raise

    def _download(self, results: list[Any], outputs: Sequence[str]) -> list[Array]:
        device, stream = self._device, self._stream
        guard = results[-1] if self._guarded else None
        found: list[Array] = []
        held: Array | None = None
        try:
            for name in outputs:
                spec = self._outputs[self._positions[name]]
                dtype = NUMPY_DTYPES[spec.datatype]
                found.append(device.download(results[self._positions[name]], spec.shape, dtype, stream))
            held = device.download(guard, (1,), _INT32, stream) if guard is not None else None
        finally:
            # Also when something failed: pinned memory that a copy still goes to must not be another's.
            device.cuda.synchronize(stream)
        if held is not None and not held[0]:
            raise InputsDeclined("tvm: the inputs do not meet a condition that the baseline checks")
        return found


@contextmanager
def _nobody_is_to_blame(device: CudaDevice) -> Iterator[None]:
    """Copies: what they find broken, another one broke."""
    device.cuda.check_not_lost()
    try:
        yield
    except CudaError as problem:
        if problem.is_poisoning:
            raise DeviceLost(device.cuda.lost) from problem
        raise


def _let_go(device: CudaDevice, stream: int, held: list[Any]) -> None:
    """Of an instance's stream and of what it holds on the card."""
    if not device.cuda.lost:
        try:
            device.cuda.destroy_stream(stream)
        except CudaError as problem:  # it may be what tells first that the GPU is lost
            _log.warning("a stream on GPU %d could not be destroyed: %s", device.ordinal, problem)
    if device.cuda.lost:
        device.cuda.keep(held)


def _pack(
    manifest: ArtifactManifest,
    library: Any,
    model: Path,
    constants: ConstantsSource,
    packed: PackedWeights,
    device: CudaDevice,
) -> list[Weight]:
    """Weights as `main` takes them on a device: those that another engine has there, else made from their sources."""
    keys = [f"{device.place} {key}" for key in manifest.packed]
    known = packed.get(keys)
    if all(weight is not None for weight in known):
        return [weight for weight in known if weight is not None]
    device.bind()
    arrays = read_parameters(manifest.parameters, model, constants)
    stream = device.cuda.create_stream()
    try:
        sources = [device.tensor_of(array, stream) for array in arrays]
        machine = _virtual_machine(library, device)
        with device.computing, device.launching_on(stream):
            try:
                # Bundled: the function takes one tuple, in which its own tuple of parameters lies.
                results = list(machine["main_transform_params"]([sources]))
            except Exception as problem:
                raise EngineError(f"tvm: weights could not be packed: {first_line(problem)}") from problem
            finally:
                device.cuda.synchronize(stream)
    finally:
        device.cuda.destroy_stream(stream)
    if len(results) != len(keys):
        raise EngineError(f"the artifact packs {len(results)} weights, its manifest tells {len(keys)}")
    return [packed.share(key, Weight(tensor)) for key, tensor in zip(keys, results, strict=True)]


def _virtual_machine(library: Any, device: CudaDevice) -> Any:
    try:
        machine = library["vm_load_executable"]()
        machine["vm_initialization"](*device.machine_arguments)
    except Exception as problem:
        raise EngineError(f"tvm: the artifact's executable does not start: {first_line(problem)}") from problem
    return machine


def _checked(spec: TensorSpec, array: Array | None) -> Array:
    if array is None:
        raise EngineError(f"tvm: input '{spec.name}' is missing")
    dtype = NUMPY_DTYPES[spec.datatype]
    if array.dtype != dtype or array.shape != spec.shape:
        raise EngineError(
            f"tvm: input '{spec.name}' is {array.dtype} {list(array.shape)}, expected {dtype} {list(spec.shape)}"
        )
    return array


def _num_bytes(spec: TensorSpec) -> int:
    return int(np.prod(spec.shape, dtype=np.int64)) * NUMPY_DTYPES[spec.datatype].itemsize
