"""`python losing_server.py SERVE-ARGUMENTS`: a server with a GPU that is not there; it loses it when IN begins with 13.

The CUDA runtime, NVML and ONNX Runtime's provider are fakes; the rest of the server is real.
"""

from __future__ import annotations

import sys

from hone import app
from hone.cli.main import main
from hone.engines import onnxruntime_cuda
from hone.engines.cuda_runtime import CudaRuntime
from hone.engines.cuda_transfers import CudaTransfers
from hone.kernels.gpu_key import find_gpus
from tests.fake_cuda import LAUNCH_FAILURE, FakeNvml, LazyCudart
from tests.fake_onnxruntime import Session

FATAL = 13.0
CUDART = LazyCudart()


class Breaking(Session):
    """What it is asked to compute with a fatal number breaks the GPU."""

    def compute(self, names, inputs):
        if inputs["IN"].flat[0] == FATAL:
            CUDART.failure = LAUNCH_FAILURE
            raise RuntimeError("CUDA failure 719: unspecified launch failure")
        return super().compute(names, inputs)


def make_session(path, graph_level, num_threads, cuda=None):
    return Breaking(path, CUDART, int(cuda["device_id"]), int(cuda["user_compute_stream"]))


if __name__ == "__main__":
    app.detect_gpus = lambda: tuple(find_gpus(FakeNvml(), CudaRuntime(CUDART)))
    app.has_cuda = lambda: True
    CudaTransfers.load = classmethod(lambda cls: cls(CudaRuntime(CUDART)))
    onnxruntime_cuda.make_session = make_session
    sys.exit(main(sys.argv[1:]))
