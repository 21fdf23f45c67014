"""The lock files: hashed throughout, of one mind, and silent about where packages come from."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = ROOT / "requirements"
LOCKS = ("runtime.txt", "runtime-cuda.txt", "dev.txt", "perf.txt", "deploy.txt", "real-models.txt")


def pins(name: str) -> dict[str, str]:
    text = (REQUIREMENTS / name).read_text()
    return dict(re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==([\w.!+-]+)", text, re.MULTILINE))


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_is_pinned_and_hashed(name):
    text = re.sub(r"^\s*#.*\n", "", (REQUIREMENTS / name).read_text(), flags=re.MULTILINE)
    requirements = re.sub(r"\\\n\s*", "", text).splitlines()
    assert requirements
    for requirement in requirements:
        assert re.fullmatch(r"[\w.-]+==[\w.!+-]+( ;.*)?( ?--hash=sha256:[0-9a-f]{64})+", requirement), requirement[:80]


@pytest.mark.parametrize("path", ["Makefile", "Dockerfile", *(f"requirements/{name}" for name in LOCKS)])
def test_no_file_names_a_package_index(path):
    assert not re.search(r"\w+://|index-url|find-links|trusted-host", strip_options(path))


def strip_options(path: str) -> str:
    """Without the Makefile's words for leaving them out (`--no-emit-...`), and without the loopback address."""
    text = (ROOT / path).read_text()
    return re.sub(r"--no-emit-[\w-]+|http://127\.0\.0\.1\b", "", text)


def test_dev_is_runtime_and_more():
    runtime, dev = pins("runtime.txt"), pins("dev.txt")
    assert runtime.items() < dev.items()


def test_cuda_differs_only_in_the_engine_and_its_libraries():
    runtime, cuda = pins("runtime.txt"), pins("runtime-cuda.txt")
    assert runtime.keys() - cuda.keys() == {"onnxruntime"}
    assert "onnxruntime-gpu" in cuda
    compiler = pins("dev.txt").keys()  # CUTLASS and what it needs are in the developers' lock as well
    extra = {name for name in cuda.keys() - runtime.keys() if not name.startswith("nvidia-")}
    assert extra - compiler == {"onnxruntime-gpu"}
    differing = {name for name in runtime.keys() & cuda.keys() if runtime[name] != cuda[name]}
    assert differing == set()


@pytest.mark.parametrize(
    ("source", "lock"),
    [
        ("runtime.in", "runtime.txt"),
        ("dev.in", "dev.txt"),
        ("cuda-compiler.in", "dev.txt"),
        ("cuda-compiler.in", "runtime-cuda.txt"),
        ("deploy.in", "deploy.txt"),
        ("perf.in", "perf.txt"),
        ("real-models.in", "real-models.txt"),
    ],
)
def test_what_is_asked_for_is_locked(source, lock):
    asked = re.findall(r"^([A-Za-z][\w.-]*)(.*)", (REQUIREMENTS / source).read_text(), re.MULTILINE)
    locked = pins(lock)
    assert asked
    for package, rest in asked:
        assert package in locked, f"{package} of {source} is not in {lock}: run `make lock`"
        exact = re.search(r"==([\w.]+)$", rest)
        if exact:
            assert locked[package] == exact[1], f"{lock} has another {package} than {source}: run `make lock`"
