"""Building and linking: failures that say why, functions that vectorise with the C library's answers."""

from __future__ import annotations

import errno
import math
import os
import subprocess

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx
from tvm.s_tir import Schedule

from hone.compiler.build import (
    BuildFailed,
    GraphRefused,
    LinkFailed,
    build_functions,
    first_line,
    graph_problem,
    source_digest,
    toolchain,
)
from hone.compiler.mathematics import expand_transcendentals
from hone.compiler.target import CpuTarget
from hone.compiler.templates.cpp.compiler import CompilerFailed, SourceCompiler
from hone.compiler.templates.cutlass.toolchain import NvccFailed

HOST = CpuTarget.detect(num_threads=1)


def unary(name, size):
    x = te.placeholder((size,), "float32", name="x")
    return te.create_prim_func([x, te.compute((size,), lambda i: getattr(tirx, name)(x[i]), name="y")])


def evaluate(name, values):
    out = tvm.runtime.tensor(np.full(values.shape, 9, np.float32))
    build_functions({"run": unary(name, values.size)}, HOST).function("run")(tvm.runtime.tensor(values), out)
    return out.numpy()


REFERENCE = {
    "exp": np.exp,
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf),
    "log": np.log,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


@pytest.mark.parametrize("name", REFERENCE)
def test_functions_are_as_exact_as_floats(name):
    rng = np.random.default_rng(0)
    values = np.concatenate(
        [
            rng.uniform(-90, 90, 4000),
            rng.standard_normal(4000),
            rng.standard_normal(4000) * 1e-3,
            rng.uniform(-10, 10, 4000),
        ]
    ).astype(np.float32)
    if name == "log":
        values = (np.abs(values) + 1e-30) * np.float32(10) ** rng.integers(-6, 6, values.size).astype(np.float32)
    if name == "sigmoid":
        values = values[values > -87]  # below, results are denormal and flushed
    exact = REFERENCE[name](values.astype(np.float64))
    got = evaluate(name, values.astype(np.float32))
    representable = np.abs(exact) < np.finfo(np.float32).max
    got, exact = got[representable], exact[representable]
    units = np.abs(got - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert units.max() <= 4


SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 89, -105, 200, -200], np.float32)


@pytest.mark.parametrize("name", REFERENCE)
def test_functions_treat_special_values_as_the_c_library(name):
    with np.errstate(all="ignore"):
        exact = REFERENCE[name](SPECIAL.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(evaluate(name, SPECIAL), exact, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("name", REFERENCE)
def test_functions_become_vectors(name):
    assembly = build_functions({"run": unary(name, 4096)}, HOST).assembly
    assert {512: "%zmm", 256: "%ymm", 128: "%xmm"}[HOST.vector_bits] in assembly
    assert not any(call in assembly for call in ("expf", "tanhf", "erff", "logf"))


def test_other_dtypes_keep_the_library():
    x = te.placeholder((8,), "float64", name="x")
    func = te.create_prim_func([x, te.compute((8,), lambda i: tirx.exp(x[i]), name="y")])
    tvm.ir.assert_structural_equal(expand_transcendentals(func), func)


def test_a_library_is_loaded_from_its_file(tmp_path):
    path = tmp_path / "kernel.so"
    build_functions({"double_it": unary("exp", 8)}, HOST).export(path)
    loaded = tvm_ffi.load_module(str(path), keep_module_alive=False)
    x, out = np.zeros(8, np.float32), tvm.runtime.tensor(np.empty(8, np.float32))
    loaded["double_it"](tvm.runtime.tensor(x), out)
    np.testing.assert_array_equal(out.numpy(), np.ones(8))


def test_without_a_compiler_linking_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LinkFailed, match=r"no C\+\+ compiler on PATH .*install g\+\+"):
        build_functions({"f": unary("exp", 8)}, HOST).export(tmp_path / "kernel.so")


def test_a_linker_that_fails_is_quoted(tmp_path, monkeypatch):
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\necho 'disk is full' >&2\nexit 3\n", encoding="utf-8")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(LinkFailed, match=r"exited with 3: disk is full"):
        build_functions({"f": unary("exp", 8)}, HOST).export(tmp_path / "kernel.so")


def test_what_tvm_refuses_is_a_failure_with_its_reason():
    x = te.placeholder((8,), "float32", name="x")
    func = te.create_prim_func([x, te.compute((8,), lambda i: x[i], name="y")])
    schedule = Schedule(func)
    schedule.bind(schedule.get_loops("y")[0], "threadIdx.x")  # a CPU has none
    with pytest.raises(BuildFailed, match="f: not implemented"):
        build_functions({"f": schedule.mod["main"]}, HOST)


def test_reasons_are_one_line():
    assert first_line(ValueError("\n  what\nwhere\n")) == "what"
    assert first_line(ValueError("code\nError message: the loop is gone\n")) == "the loop is gone"
    assert first_line(ValueError()) == "ValueError"


def test_source_digests_see_every_file(tmp_path):
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text("a", encoding="utf-8")
    second.write_text("b", encoding="utf-8")
    digest = source_digest([first, second])
    assert digest == source_digest([second, first])
    second.write_text("c", encoding="utf-8")
    assert digest != source_digest([first, second])


def test_the_toolchain_has_its_versions():
    assert set(toolchain()) == {"tvm", "tvm-ffi", "llvm"}
    assert all(toolchain().values())


@pytest.mark.parametrize(
    ("features", "triple", "bits", "registers"),
    [
        (("avx2", "avx512f"), "", 512, 32),
        (("avx2",), "", 256, 16),
        (("sse2",), "", 128, 16),
        (("neon",), "aarch64-linux-gnu", 128, 32),
    ],
)
def test_vectors_follow_the_features(features, triple, bits, registers):
    target = CpuTarget.of_features("generic", features, triple=triple)
    assert (target.vector_bits, target.num_vector_registers) == (bits, registers)


def test_features_that_the_machine_lacks_are_switched_off():
    target = CpuTarget.of_features("skylake-avx512", ("avx2",), disabled_features=("avx512f",))
    assert "-avx512f" in [str(a) for a in target.tvm().attrs["mattr"]]


@pytest.mark.parametrize("change", ["mcpu", "disabled_features", "vector_bits", "num_threads", "parallel_min_us"])
def test_target_fields_tell_what_changes_code(change):
    values = {
        "mcpu": "haswell",
        "disabled_features": ("avx2",),
        "vector_bits": 64,
        "num_threads": 2,
        "parallel_min_us": 1.0,
    }
    fields = {name: getattr(HOST, name) for name in HOST.__dataclass_fields__}
    assert CpuTarget(**{**fields, change: values[change]}).fields() != HOST.fields()


@pytest.mark.parametrize(
    "problem",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        MemoryError(),
        RuntimeError("std::bad_alloc"),
        subprocess.TimeoutExpired("nvcc", 600.0),
        CompilerFailed("g++", None, ""),
        CompilerFailed("g++", -9, ""),
        CompilerFailed("g++", 1, "g++: fatal error: Killed signal terminated program cc1plus"),
        CompilerFailed("g++", 1, "k.cpp:1: note: x\nerror: cannot write k.s: No space left on device"),
        CompilerFailed("g++", 1, "cc1plus: out of memory allocating 65536 bytes"),
        CompilerFailed("clang++", 254, "clang++: error: unable to execute command: Killed"),
        NvccFailed("was ended by signal 9", ""),
        LinkFailed("g++ exited with 1: /usr/bin/ld: final link failed: No space left on device"),
        BuildFailed("a part of it", MemoryError()),
    ],
    ids=str,
)
def test_what_the_machine_is_to_blame_for(problem):
    assert BuildFailed("a kernel", problem).is_of_the_machine
    assert not isinstance(graph_problem("phase 5", problem), GraphRefused)


@pytest.mark.parametrize(
    "problem",
    [
        ValueError("no such loop"),
        CompilerFailed("g++", 1, "kernel.cpp:3: error: no such type"),
        CompilerFailed("g++", 1, "internal compiler error: Segmentation fault"),
        NvccFailed("exited with 1", "kernel.cu(7): error: no such tile", is_refusal=True),
        LinkFailed("g++ exited with 1: undefined reference to `f'"),
        BuildFailed("a part of it", ValueError("no such loop")),
    ],
    ids=str,
)
def test_what_a_candidate_is_to_blame_for(problem):
    assert not BuildFailed("a kernel", problem).is_of_the_machine


def test_a_compiler_that_is_killed_says_nothing_of_its_source(tmp_path):
    """By a real process: what stands for the compiler kills itself."""
    command = tmp_path / "g++"
    command.write_text('#!/bin/sh\n[ "$1" = --version ] || kill -9 $$\n')
    command.chmod(0o755)
    with pytest.raises(BuildFailed, match="exited with -9") as raised:
        SourceCompiler(str(command), ".cpp", ()).compile("int f();", tmp_path / "kernel.so")
    assert raised.value.is_of_the_machine
