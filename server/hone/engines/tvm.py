"""The tuned engine: runs an artifact on TVM's runtime, without the `tvm` package.

Memory flows through without copies: inputs are passed as they lie where they are aligned, outputs are the virtual
machine's own tensors, which live as long as someone looks at them. Weights are packed once and shared by all engines
that need the same packing. When an engine and its instances are gone, so are its files' mappings.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from hone.engines.base import view_memory
from hone.engines.onnx_weights import read_initializers
from hone.engines.tvm_artifact import MODULE_FILE, ArtifactManifest, ParameterSource
from hone.engines.tvm_library import Library
from hone.engines.tvm_runtime import TvmRuntime
from hone.errors import EngineError, InputsDeclined
from hone.types import NUMPY_DTYPES, Array, TensorSpec

#: What compiled code expects of every tensor's address.
ALIGNMENT = 64

_DLPACK = (1, 0)  # the version that can tell read-only arrays
_CPU, _DEVICE, _POOLED = 1, 0, 2
_BFLOAT16 = NUMPY_DTYPES["BF16"]

#: Digest of an entry under `constants/` -> its tensors.
ConstantsSource = Callable[[str], Mapping[str, Array]]


class PackedWeights:
    """The weights in use by any engine of this process, by the key of their packing. Thread-safe.

    It holds nothing by itself: a weight lives while an engine uses it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: weakref.WeakValueDictionary[str, Weight] = weakref.WeakValueDictionary()

    @property
    def num_weights(self) -> int:
        return len(self._tensors)

    def get(self, keys: Sequence[str]) -> list[Weight | None]:
        with self._lock:
            return [self._tensors.get(key) for key in keys]

    def share(self, key: str, weight: Weight) -> Weight:
        """The weight that is already known under the key, else this one from now on."""
        with self._lock:
            return self._tensors.setdefault(key, weight)


class Weight:
    """A tensor that can be looked at from a weak dictionary."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


class TvmEngine:
    """One artifact, ready to run. Thread-safe but for `close`; each thread runs an instance of its own."""

    kind = "tvm"
    initializers: tuple[TensorSpec, ...] = ()
    is_steady = True

    def __init__(
        self, manifest: ArtifactManifest, library: Library, runtime: TvmRuntime, weights: list[Weight]
    ) -> None:
        self.inputs = manifest.inputs
        self.outputs = manifest.outputs
        self._manifest = manifest
        self._library: Library | None = library
        self._runtime = runtime
        self._weights = weights
        self._packed = tvm_ffi.convert([weight.tensor for weight in weights])

    @classmethod
    def load(
        cls,
        folder: Path,
        manifest: Mapping[str, Any],
        *,
        model: Path,
        kernels: Mapping[str, Path],
        constants: ConstantsSource,
        runtime: TvmRuntime,
        packed: PackedWeights,
    ) -> TvmEngine:
        """Load an artifact: its folder and manifest, the model's file, and the libraries of its kernels and of its pool
        by digest.

        Raises EngineError when a file is missing or does not load, or a weight is not what the artifact was made for.
        """
        told = ArtifactManifest.from_fields(manifest)
        _load_pool(told, folder, kernels, runtime)
        library = runtime.libraries.open(folder / MODULE_FILE, told.kernels, kernels)
        weights = _pack(told, library.module, model, constants, packed, runtime)
        return cls(told, library, runtime, weights)

    def instantiate(self, num_threads: int = 0) -> TvmInstance:
        """`num_threads` run it, the calling one included (0: as many as the runtime was loaded with)."""
        if self._library is None:
            raise EngineError("the engine is closed")
        num_threads = num_threads or self._runtime.num_threads
        return TvmInstance(self._manifest, self._library, self._packed, self._weights, self._runtime, num_threads)

    def close(self) -> None:
        """Drops the code, and the weights that nobody else uses. Outputs handed out stay valid."""
        self._library = None
        self._packed = None
        self._weights = []
        self._runtime.clear_memory()


class TvmInstance:
    """One virtual machine; for one thread at a time."""

    def __init__(
        self,
        manifest: ArtifactManifest,
        library: Library,
        packed: Any,
        weights: list[Weight],
        runtime: TvmRuntime,
        num_threads: int,
    ) -> None:
        self._library = library  # its code must not be loaded anew while this runs it
        self._machine = machine = _virtual_machine(library.module)  # functions of a module do not keep it alive
        self._main = machine["main"]
        self._packed = packed
        self._runtime = runtime
        self._parallel = runtime.parallel
        self._num_threads = num_threads
        self._weight_ranges = [range_of(weight.tensor) for weight in weights]
        self._names = tuple(spec.name for spec in manifest.inputs)
        self._dtypes = tuple(NUMPY_DTYPES[spec.datatype] for spec in manifest.inputs)
        self._shapes = tuple(spec.shape for spec in manifest.inputs)
        self._positions = {spec.name: at for at, spec in enumerate(manifest.outputs)}
        self._all_outputs = [spec.name for spec in manifest.outputs]
        self._returns_tuple = manifest.returns_tuple
        self._guarded = manifest.guarded
        self._scratch: dict[int, Array] = {}
        #: Which outputs lie in memory of inputs or weights: a property of the program, found out in the first run.
        self._borrowed: frozenset[int] | None = None

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Run once. Inputs have exactly the shapes and dtypes that the engine tells. Raises EngineError; InputsDeclined
        for inputs that the baseline must answer (an index out of range, say).

        The arrays returned are the machine's own memory, not reused while they live; what would overlap an input or
        a weight is copied.
        """
        arguments = []
        for at, name in enumerate(self._names):
            array = inputs.get(name)
            if array is None:
                raise EngineError(f"tvm: input '{name}' is missing")
            arguments.append(self._argument(at, array))
        self._parallel.use_threads(self._num_threads)
        try:
            result = self._main(*arguments, self._packed)
        except Exception as problem:  # tvm-ffi turns errors of compiled code into many classes
            raise EngineError(f"tvm: {first_line(problem)}") from problem
        results = result if self._returns_tuple else (result,)
        if self._guarded:
            *results, guard = results
            if not ctypes.c_int32.from_address(guard.data_ptr()).value:
                raise InputsDeclined("tvm: the inputs do not meet a condition that the baseline checks")
        if self._borrowed is None:
            self._borrowed = self._find_borrowed(arguments, results)
        if outputs == self._all_outputs and not self._borrowed:
            return [_to_numpy(tensor) for tensor in results]
        arrays = []
        for name in outputs:
            position = self._positions.get(name)
            if position is None:
                raise EngineError(f"tvm: output '{name}' is unknown")
            array = _to_numpy(results[position])
            arrays.append(array.copy() if position in self._borrowed else array)
        return arrays

    def _argument(self, at: int, array: Array) -> Any:
        dtype, shape = self._dtypes[at], self._shapes[at]
        if array.dtype != dtype or array.shape != shape:
            raise EngineError(
                f"tvm: input '{self._names[at]}' is {array.dtype} {list(array.shape)}, expected {dtype} {list(shape)}"
            )
        if dtype == _BFLOAT16 or not array.size:
            return _tensor_of(self._aligned(at, array), self._runtime)
        tensor = tvm_ffi.from_dlpack(array.__dlpack__(max_version=_DLPACK))
        if tensor.data_ptr() % ALIGNMENT == 0 and array.flags.c_contiguous:
            return tensor
        return tvm_ffi.from_dlpack(self._aligned(at, array))

    def _aligned(self, at: int, array: Array) -> Array:
        """A copy in memory that this instance uses again in its next run; outputs never lie in it."""
        if at not in self._scratch:
            self._scratch[at] = aligned_empty(array.shape, array.dtype)
        place: Array = self._scratch[at]
        np.copyto(place, array)
        return place

    def _find_borrowed(self, arguments: Sequence[Any], results: Sequence[Any]) -> frozenset[int]:
        taken = [range_of(argument) for argument in arguments] + self._weight_ranges
        borrowed = set()
        for at, tensor in enumerate(results):
            first, last = range_of(tensor)
            if any(first < end and start < last for start, end in taken):
                borrowed.add(at)
        return frozenset(borrowed)


def aligned_empty(shape: Sequence[int], dtype: Any) -> Array:
    """An uninitialised array at an address that compiled code takes as it is."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    array: Array = raw[offset : offset + num_bytes].view(dtype).reshape(shape)
    return array


def _load_pool(manifest: ArtifactManifest, folder: Path, libraries: Mapping[str, Path], runtime: TvmRuntime) -> None:
    """The threads for parallel loops, before the code that has them."""
    if manifest.pool is None:
        kernels = (libraries[digest] for digest in manifest.kernels if digest in libraries)
        runtime.parallel.check((folder / MODULE_FILE, *kernels))
    elif manifest.pool not in libraries:
        raise EngineError(f"the pool {manifest.pool} for the artifact's parallel loops is not in the cache")
    else:
        runtime.parallel.load(libraries[manifest.pool], runtime.num_threads)


def _pack(
    manifest: ArtifactManifest,
    library: Any,
    model: Path,
    constants: ConstantsSource,
    packed: PackedWeights,
    runtime: TvmRuntime,
) -> list[Weight]:
    """Weights as `main` takes them: those that another engine has, else made from their sources."""
    known = packed.get(manifest.packed)
    if all(weight is not None for weight in known):
        return [weight for weight in known if weight is not None]
    arrays = read_parameters(manifest.parameters, model, constants)
    machine = _virtual_machine(library)
    try:
        # Bundled: the function takes one tuple, in which its own tuple of parameters lies.
        results = list(machine["main_transform_params"]([[_tensor_of(array, runtime) for array in arrays]]))
    except Exception as problem:
        raise EngineError(f"tvm: weights could not be packed: {first_line(problem)}") from problem
    if len(results) != len(manifest.packed):
        raise EngineError(f"the artifact packs {len(results)} weights, its manifest tells {len(manifest.packed)}")
    return [
        packed.share(key, Weight(_owned(tensor, arrays, runtime)))
        for key, tensor in zip(manifest.packed, results, strict=True)
    ]


def read_parameters(sources: Sequence[ParameterSource], model: Path, constants: ConstantsSource) -> list[Array]:
    named = [source.initializer for source in sources if source.initializer is not None]
    initializers = read_initializers(model, named)
    folders: dict[str, Mapping[str, Array]] = {}
    arrays = []
    for source in sources:
        if source.initializer is not None:
            array = initializers[source.initializer]
        else:
            assert source.constants is not None
            if source.constants not in folders:
                folders[source.constants] = constants(source.constants)
            if source.name not in folders[source.constants]:
                raise EngineError(f"constants {source.constants} have no tensor '{source.name}'")
            array = folders[source.constants][source.name]
        expected = NUMPY_DTYPES[source.datatype]
        if array.dtype != expected or array.shape != source.shape:
            raise EngineError(
                f"weight '{source.name}' is {array.dtype} {list(array.shape)},"
                f" the artifact was made for {expected} {list(source.shape)}"
            )
        array = np.ascontiguousarray(array).reshape(source.shape)
        if hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest() != source.sha256:
            raise EngineError(f"weight '{source.name}' is not the one that the artifact was made for")
        arrays.append(array)
    return arrays


def _owned(tensor: Any, sources: Sequence[Array], runtime: TvmRuntime) -> Any:
    """The tensor, copied where it lies in a source: that may be the model's file, whose mapping must be able to go."""
    first, last = range_of(tensor)
    for array in sources:
        start = array.ctypes.data
        if first < start + array.nbytes and start < last:
            return _tensor_of(_to_numpy(tensor), runtime, copy=True)
    return tensor


def _tensor_of(array: Array, runtime: TvmRuntime, *, copy: bool = False) -> Any:
    """A tensor over the array, or over a copy at an aligned address where it lies elsewhere (or `copy` asks for it)."""
    if copy or array.ctypes.data % ALIGNMENT:
        place = aligned_empty(array.shape, array.dtype)
        np.copyto(place, array)
        array = place
    if array.dtype == _BFLOAT16:
        bits = tvm_ffi.from_dlpack(array.view(np.uint16).__dlpack__(max_version=_DLPACK))
        return runtime.view(bits, tvm_ffi.Shape(array.shape), tvm_ffi.dtype("bfloat16"), 0)
    if not array.size:  # NumPy's strides are others than those that compiled code asks for
        flat = tvm_ffi.from_dlpack(array.reshape(-1).__dlpack__(max_version=_DLPACK))
        return runtime.view(flat, tvm_ffi.Shape(array.shape), flat.dtype, 0)
    return tvm_ffi.from_dlpack(array.__dlpack__(max_version=_DLPACK))


def _virtual_machine(library: Any) -> Any:
    try:
        machine = library["vm_load_executable"]()
        machine["vm_initialization"](_CPU, _DEVICE, _POOLED)
    except Exception as problem:
        raise EngineError(f"tvm: the artifact's executable does not start: {first_line(problem)}") from problem
    return machine


def range_of(tensor: Any) -> tuple[int, int]:
    start = tensor.data_ptr()
    size = (tensor.dtype.bits + 7) // 8
    for dim in tensor.shape:
        size *= dim
    return start, start + size


def _to_numpy(tensor: Any) -> Array:
    try:
        array: Array = np.from_dlpack(tensor)
        return array
    except (BufferError, RuntimeError):  # bfloat16, which DLPack's numpy does not know
        start, end = range_of(tensor)
        return view_memory(start, end - start, tensor).view(_BFLOAT16).reshape(tuple(tensor.shape))


def first_line(problem: BaseException) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[0] if lines else type(problem).__name__
