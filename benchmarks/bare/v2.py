"""The v2 answers of the floors: one identity model, and what perf_analyzer asks before, between and after its load."""

from __future__ import annotations

from typing import Any, Final

import orjson

MODEL_NAME: Final = "identity"
INPUT_NAME: Final = "IN"
OUTPUT_NAME: Final = "OUT"

SERVER_METADATA: Final[dict[str, Any]] = {
    "name": "triton",
    "version": "2.73.0",
    "extensions": ["model_configuration", "binary_tensor_data", "statistics"],
}
MODEL_METADATA: Final[dict[str, Any]] = {
    "name": MODEL_NAME,
    "versions": ["1"],
    "platform": "bare",
    "inputs": [{"name": INPUT_NAME, "datatype": "FP32", "shape": [-1]}],
    "outputs": [{"name": OUTPUT_NAME, "datatype": "FP32", "shape": [-1]}],
}
MODEL_CONFIG: Final[dict[str, Any]] = {
    "name": MODEL_NAME,
    "platform": "bare",
    "backend": "bare",
    "max_batch_size": 0,
    "input": [{"name": INPUT_NAME, "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": OUTPUT_NAME, "data_type": "TYPE_FP32", "dims": [-1]}],
}
_DURATIONS: Final = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)


class IdentityModel:
    """The model's answers, and the one count perf_analyzer needs: it finds the version it measured by its growth."""

    def __init__(self) -> None:
        self._num_requests = 0

    def get(self, path: str) -> dict[str, Any] | None:
        """The JSON answer to a GET of ``path``, or None where there is no such route."""
        model = f"/v2/models/{MODEL_NAME}"
        path = path.replace(f"{model}/versions/1", model, 1)
        if path == f"{model}/stats":
            return self.statistics()
        return {
            "/v2": SERVER_METADATA,
            "/v2/health/live": {"live": True},
            "/v2/health/ready": {"ready": True},
            model: MODEL_METADATA,
            f"{model}/ready": {"name": MODEL_NAME, "ready": True},
            f"{model}/config": MODEL_CONFIG,
        }.get(path)

    def statistics(self) -> dict[str, Any]:
        counts = {
            name: {"count": self._num_requests if name in ("success", "queue") else 0, "ns": 0} for name in _DURATIONS
        }
        return {
            "model_stats": [
                {
                    "name": MODEL_NAME,
                    "version": "1",
                    "last_inference": 0,
                    "inference_count": self._num_requests,
                    "execution_count": self._num_requests,
                    "inference_stats": counts,
                    "batch_stats": [],
                }
            ]
        }

    def count_request(self) -> None:
        self._num_requests += 1

    def infer(self, head: memoryview, tensor_size: int) -> bytes:
        """The JSON part of the response to a request with that JSON part; the tensor follows as it came."""
        self._num_requests += 1
        request = orjson.loads(head)
        tensor = request["inputs"][0]
        response: dict[str, Any] = {
            "model_name": MODEL_NAME,
            "model_version": "1",
            "outputs": [
                {
                    "name": OUTPUT_NAME,
                    "datatype": tensor["datatype"],
                    "shape": tensor["shape"],
                    "parameters": {"binary_data_size": tensor_size},
                }
            ],
        }
        if "id" in request:
            response["id"] = request["id"]
        return orjson.dumps(response)
