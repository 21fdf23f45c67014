"""Real artifacts in a real cache, within a second: modules that hone's compiler made, their one kernel C++ of a test's.

The model is OUT = softmax(IN) over four numbers. Everything is what tuning leaves behind (manifest, verdict, digests,
two shared libraries), but the kernel may do harm besides: to IN that begins with FATAL, which no made-up input does.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from hone.kernels import DeviceKey, KernelsCache
from hone.repository import ModelRepository
from hone.specialization import Signature, VersionRef
from hone.tuning.artifacts import KeyMaker
from hone.tuning.ports import TunableVersion
from hone.tuning.settings import ModelTuning
from tests import models
from tests.process.publishing import publish_artifact, publish_kernel
from tests.running import RunningServer

SIGNATURE = Signature.of([("IN", "FP32", (1, 4))])
CONFIG = "max_batch_size: 1"
#: With which a server finds what is published here.
THREADS = "--intra-op-threads=1"

FATAL = 13.0
ROW, FATAL_ROW = [[1.0, 2.0, 3.0, 4.0]], [[FATAL, 2.0, 3.0, 4.0]]

_SOURCE = """
#include <cmath>
#include <cstdlib>
#include <thread>
#include <time.h>
#include <tvm/ffi/c_api.h>

namespace {
int* volatile nowhere = nullptr;
volatile int seven = 7, zero = 0;
volatile int sink = 0;

const DLTensor& tensor(const TVMFFIAny& argument) {
  return argument.type_index == kTVMFFITensor ? *TVMFFITensorGetDLTensorPtr(argument.v_obj)
                                              : *static_cast<const DLTensor*>(argument.v_ptr);
}
float* data(const DLTensor& tensor) {
  return reinterpret_cast<float*>(static_cast<char*>(tensor.data) + tensor.byte_offset);
}
double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}
}  // namespace

extern "C" __attribute__((visibility("default"))) int __tvm_ffi_@NAME@(
    void*, const TVMFFIAny* arguments, int32_t, TVMFFIAny* result) {
  const float* in = data(tensor(arguments[0]));
  float* out = data(tensor(arguments[1]));
  float total = 0;
  for (int i = 0; i < 4; ++i) total += out[i] = std::exp(in[i]);
  for (int i = 0; i < 4; ++i) out[i] /= total;
  const bool is_fatal = in[0] == 13.0f;
  @HARM@
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  return 0;
}
"""


def softmax(note: str) -> bytes:
    """The model's file; another note makes it another file, and its artifact another."""
    dims = ("batch", 4)
    node = helper.make_node("Softmax", ["IN"], ["OUT"], axis=-1)
    built = onnx.load_model_from_string(models.model([node], {"IN": ("FP32", dims)}, {"OUT": ("FP32", dims)}))
    built.doc_string = note
    return built.SerializeToString()


def softmax_of(row: list[float]) -> np.ndarray:
    powers = np.exp(np.array(row, np.float64))
    return powers / powers.sum()


def compile_softmax(folder: Path) -> Path:
    """An artifact's files in a folder, with the kernel that hone's own template makes."""
    from tests.unit.engines.tvm_artifacts import compile_to, save_model

    model = folder.with_suffix(".onnx")
    values = ("float32", [1, 4])
    save_model(model, [("Softmax", ["IN"], ["OUT"], {"axis": -1})], {"IN": values}, {"OUT": values})
    return compile_to(folder, model)


def with_kernel(compiled: Path, folder: Path, harm: str) -> Path:
    """A copy of what `compile_softmax` made whose kernel runs the statement `harm` after its work."""
    from hone.compiler.templates.base import KERNEL_PREFIX
    from hone.compiler.templates.cpp.compiler import host_compiler

    shutil.copytree(compiled, folder)
    [kernel] = (folder / "kernels").iterdir()
    source = _SOURCE.replace("@NAME@", KERNEL_PREFIX + kernel.name).replace("@HARM@", harm)
    (kernel / "kernel.so").unlink()
    host_compiler(()).compile(source, kernel / "kernel.so")
    return folder


def digest_of(repository: Path, model: str) -> str:
    """The name of the model's one artifact, as a server with THREADS makes it."""
    device = DeviceKey.for_cpu()
    definitions = ModelRepository((repository,))
    definition = definitions.read(model)
    definitions.close()
    ref = VersionRef(model, 1, definition.version_fingerprints[1])
    version = TunableVersion(ref, definition.versions[1], baseline=None, max_batch_size=1)  # type: ignore[arg-type]
    return KeyMaker([device], margin=0.03, run_threads=1)(version, ModelTuning(), SIGNATURE, device.digest)


@dataclass(frozen=True)
class Place:
    """A repository and a cache of one test."""

    repository: Path
    cache: Path

    @property
    def root(self) -> Path:
        return self.repository.parent

    @property
    def flags(self) -> tuple[str, ...]:
        return (f"--kernels-cache={self.cache}", THREADS)

    def add(self, model: str, artifact: Path | None = None, *, proven: bool = True) -> str:
        """Add a softmax under this name, with an artifact where one is given: one that passed the gate, or one that has
        still to. Returns its digest."""
        models.write_model(self.repository, model, softmax(model), config=CONFIG)
        digest = digest_of(self.repository, model)
        if artifact is not None:
            cache = KernelsCache(self.cache)
            publish_kernel(cache, artifact)
            publish_artifact(cache, artifact, digest, proven=proven)
            cache.close()
        return digest

    def artifacts(self) -> set[str]:
        """Digests of the artifacts in the cache, all of whose files are whole."""
        cache = KernelsCache(self.cache)
        report = cache.verify()
        assert report.problems == (), report.problems
        names = {listed.name.digest for listed in cache.entries() if listed.name.kind == "artifacts"}
        cache.close()
        return names


def tuning(server: RunningServer, model: str) -> dict:
    status, told = server.get(f"/v2/models/{model}/tuning")
    assert status == 200, told
    return told


def engine(server: RunningServer, model: str) -> str:
    """What runs the model's one specialization; empty while nobody has looked at it."""
    buckets = tuning(server, model)["buckets"]
    return buckets[0]["engine"] if buckets else ""


def assert_answers(server: RunningServer, model: str, rows: list[list[float]] = ROW) -> None:
    """Right ones, whichever engine gives them."""
    status, answer = server.infer(model, rows)
    assert status == 200, answer
    np.testing.assert_allclose(answer["outputs"][0]["data"], softmax_of(rows[0]), rtol=1e-4)


def mapped(server: RunningServer) -> list[str]:
    """The files of tuned code in the server's memory."""
    lines = Path(f"/proc/{server.process.pid}/maps").read_text("utf-8").splitlines()
    return sorted({line.split(maxsplit=5)[5] for line in lines if line.endswith(("/module.so", "/kernel.so"))})
