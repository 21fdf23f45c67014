"""The architecture as a test: imports point down, heavy packages stay where they belong, starting is quick."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hone

PACKAGE = Path(hone.__file__).parent

#: From the top down; a part may import from lower rows, and from itself, never from its own row or above.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("app",),
    ("frontends", "tuning", "dashboard"),
    ("serving", "compiler"),
    ("engines", "repository", "kernels"),
    ("tracing", "logs"),
    ("metrics",),
    ("specialization", "strings", "protos", "types", "config", "errors"),
)
RANK = {part: len(LAYERS) - row for row, parts in enumerate(LAYERS) for part in parts}
#: The foundation may lean on itself in this order only.
FOUNDATION = ("errors", "types", "config", "protos", "strings", "specialization")

#: Package -> where in hone it may be imported.
CONFINED = {
    "fastapi": ("frontends/http", "dashboard/", "app.py"),
    "starlette": ("frontends/http", "dashboard/", "app.py"),
    "uvicorn": ("frontends/http", "app.py"),
    "grpc": ("frontends/grpc", "protos.py", "app.py"),
    "grpc_health": ("frontends/grpc",),
    "tritonclient": ("protos.py",),
    "tvm": ("compiler/",),
    "onnxruntime": ("engines/onnxruntime.py", "engines/onnxruntime_memory.py", "tuning/", "compiler/"),
    "opentelemetry": ("tracing.py",),
    "prometheus_client": ("metrics/", "tuning/metrics.py", "app.py", "cli/tune.py"),
}


def imports_of(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(node.module or "")
            if node.module == "hone":
                names += [f"hone.{alias.name}" for alias in node.names]
    return names


def part_of(module: str) -> str:
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else ""


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    relative = path.relative_to(PACKAGE)
    own = relative.parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for module in imports_of(path):
        part = part_of(module) if module.split(".")[0] == "hone" else ""
        if part in ("", own, "__version__"):
            continue
        assert part in RANK, f"{relative} imports hone.{part}, which has no layer"
        if own in FOUNDATION and part in FOUNDATION:
            assert FOUNDATION.index(part) < FOUNDATION.index(own), f"{relative} imports hone.{part}"
        else:
            assert RANK[part] < RANK[own], f"{relative} imports hone.{part}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_packages_stay_where_they_belong(path):
    relative = str(path.relative_to(PACKAGE))
    for module in imports_of(path):
        places = CONFINED.get(module.split(".")[0])
        assert places is None or relative.startswith(places), f"{relative} imports {module}"


def modules_after(statement: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after the statement."""
    code = f"{statement}\nimport sys; print('\\n'.join(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(ran.stdout.split())


def test_the_server_never_loads_the_compiler_nor_an_http_client():
    loaded = modules_after("import hone.app")
    for package in ("tvm", "tritonclient.http", "geventhttpclient", "onnx", "sklearn", "PIL", "opentelemetry.sdk"):
        assert package not in loaded


def test_asking_for_help_loads_no_server():
    loaded = modules_after("import hone.cli.main")
    for package in ("fastapi", "grpc", "onnxruntime", "uvicorn", "uvloop", "opentelemetry"):
        assert package not in loaded
