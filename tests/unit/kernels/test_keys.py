"""Each field of a key changes the digest: a baseline, and for every field a twin that differs in it alone."""

from __future__ import annotations

import dataclasses

import pytest

from hone.kernels import ArtifactKey, DecisionKey, KernelKey, Toolchain, digest_of

TOOLCHAIN = Toolchain("0.27", "0.1.14", "x86_64 znver5", "g++ 12.2.0", "13.0", "4.2.0")
TOOLCHAIN_TWINS = {
    "tvm": "0.28",
    "tvm_ffi": "0.1.15",
    "llvm": "x86_64 znver4",
    "cxx": "g++ 13.1.0",
    "nvcc": "13.1",
    "cutlass": "4.3.0",
}

BASELINES = (
    KernelKey(
        template="cpu/direct_conv",
        candidate={"tile": [4, 16]},
        workload={"op": "conv2d", "shape": [1, 64, 56, 56]},
        source_sha256="a" * 64,
        flags=("-O3", "-mavx512f"),
        architecture="x86-64-v4-0123",
        toolchain=TOOLCHAIN,
    ),
    DecisionKey(
        workload={"op": "conv2d", "shape": [1, 64, 56, 56]},
        templates_sha256="b" * 64,
        precision="fp32",
        device="c" * 64,
        toolchain=TOOLCHAIN,
    ),
    ArtifactKey(
        graph_sha256="d" * 64,
        weights_sha256="e" * 64,
        signature={"x": {"dtype": "FP32", "shape": [1, 8]}},
        precision="fp32",
        objective="latency",
        templates_sha256="b" * 64,
        pipeline_sha256="f" * 64,
        flags=("opt-level=3",),
        device="c" * 64,
        toolchain=TOOLCHAIN,
    ),
)

TWINS = {
    "template": "cpu/other",
    "candidate": {"tile": [8, 16]},
    "workload": {"op": "conv2d", "shape": [1, 64, 56, 57]},
    "source_sha256": "0" * 64,
    "flags": ("-O3",),
    "architecture": "x86-64-v3-0123",
    "templates_sha256": "0" * 64,
    "pipeline_sha256": "0" * 64,
    "precision": "bf16",
    "device": "0" * 64,
    "graph_sha256": "0" * 64,
    "weights_sha256": "0" * 64,
    "signature": {"x": {"dtype": "FP32", "shape": [2, 8]}},
    "objective": "throughput",
    "schema": 2,
}

CASES = [
    (baseline, field.name)
    for baseline in BASELINES
    for field in dataclasses.fields(baseline)
    if field.name != "toolchain"
]


@pytest.mark.parametrize(("baseline", "field"), CASES, ids=lambda value: getattr(value, "kind", value))
def test_each_field_changes_the_digest(baseline, field):
    twin = dataclasses.replace(baseline, **{field: TWINS[field]})
    assert twin.digest != baseline.digest
    assert dataclasses.replace(twin, **{field: getattr(baseline, field)}).digest == baseline.digest


@pytest.mark.parametrize("baseline", BASELINES, ids=lambda key: key.kind)
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Toolchain)])
def test_each_tool_changes_the_digest(baseline, field):
    toolchain = dataclasses.replace(TOOLCHAIN, **{field: TOOLCHAIN_TWINS[field]})
    assert dataclasses.replace(baseline, toolchain=toolchain).digest != baseline.digest


@pytest.mark.parametrize("baseline", BASELINES, ids=lambda key: key.kind)
def test_every_field_is_in_the_fields(baseline):
    names = {field.name for field in dataclasses.fields(baseline)}
    assert set(baseline.fields) == names | {"kind"}
    assert baseline.digest == digest_of(baseline.fields)


def test_kinds_never_share_a_digest():
    assert len({key.digest for key in BASELINES}) == len(BASELINES)
