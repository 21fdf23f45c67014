"""Compiled kernels that the gate must not let pass: the real child says why, and clients never see any of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.real_artifacts import Place, assert_answers, mapped, tuning, with_kernel
from tests.running import run_server, wait_until

KERNELS = {
    "wrong by a percent": ("out[0] *= 1.01f;", "refused", "OUT"),
    "no number": ("out[3] = 0.0f * std::exp(1000.0f);", "refused", "OUT"),
    "crashes": ("sink = *nowhere;", "failed", "died by SIGSEGV"),
}


@pytest.mark.parametrize("kind", KERNELS)
def test_the_baseline_serves_on(kind: str, place: Place, compiled_softmax: Path, tmp_path: Path) -> None:
    harm, outcome, reason = KERNELS[kind]
    place.add("m", with_kernel(compiled_softmax, tmp_path / "artifact", harm), proven=False)
    with run_server(place.repository, "--tuning=on", *place.flags) as server:
        told = wait_until(
            lambda: (told := tuning(server, "m"))["state"] not in ("queued", "tuning") and told, "it was judged"
        )
        [bucket] = told["buckets"]
        assert (bucket["engine"], bucket["outcome"]) == ("onnxruntime", outcome), bucket
        assert reason in bucket["reason"]
        assert server.metric("hone_tuning_promotions_total") == 0
        assert mapped(server) == [], "its code never came into the server"
        assert_answers(server, "m")
        assert server.stop() == 0
