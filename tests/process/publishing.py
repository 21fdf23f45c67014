"""Putting a compiled artifact into the cache, and what the tests share in which something happens meanwhile.

`publishing_worker` is the child to which it happens; it imports this, so nothing here takes long to import.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hone.kernels import DeviceKey, Entry, KernelsCache
from hone.tuning.inputs import Domain
from tests.running import RunningServer, wait_until

if TYPE_CHECKING:
    from tests.process.real_artifacts import Place

_HERE = Path(__file__).parent
PROGRAM = (
    str(_HERE / "altered_server.py"),
    json.dumps({"command": [sys.executable, str(_HERE / "publishing_worker.py")]}),
)
FLAGS = ("--model-control-mode=explicit", "--tuning=on")

VERDICT = {"passed": True, "speedup": 2.0, "baseline_ms": 1.0, "tuned_ms": 0.5, "max_error": 0.0, "tolerance": 1e-3}


def publish_kernel(cache: KernelsCache, artifact: Path) -> None:
    device = DeviceKey.for_cpu()
    [kernel] = (artifact / "kernels").iterdir()
    files = {"kernel.so": kernel / "kernel.so"}
    assert isinstance(cache.publish("kernels", kernel.name, device.architecture, files, {}), Entry)


def publish_artifact(cache: KernelsCache, artifact: Path, digest: str, *, proven: bool = True) -> None:
    """After its kernel. What is not `proven` goes through the gate before it serves, as what was imported does."""
    device = DeviceKey.for_cpu()
    told = json.loads((artifact / "manifest.json").read_text("utf-8"))
    requires = [{"kind": "kernels", "digest": kernel, "scope": device.architecture} for kernel in told["kernels"]]
    domains = {"IN": Domain("FP32", (1, 4), -1, 1).to_json()}
    manifest = {**told, "verdict": VERDICT, "domains": domains, "requires": requires}
    files = {"module.so": artifact / "module.so"}
    assert isinstance(cache.publish("artifacts", digest, device.digest, files, manifest, proven=proven), Entry)


def prepare(place: Place, artifact: Path, script: dict[str, dict[str, str]]) -> None:
    """What children are to publish, and what they do at which step of it, by model."""
    if not (place.root / "artifact").exists():
        shutil.copytree(artifact, place.root / "artifact")
    (place.root / "script.json").write_text(json.dumps(script), "utf-8")


def load(server: RunningServer, model: str) -> None:
    assert server.post(f"/v2/repository/models/{model}/load")[0] == 200


def wait_at(place: Place, model: str, step: str) -> None:
    wait_until((place.root / f"{model}.{step}").exists, f"the child of {model} comes to '{step}'")


def child_of(server: RunningServer) -> int:
    """The leader of the tuning child's group, which must be there."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"PPid:\t{server.process.pid}\n" in (path / "status").read_text("utf-8"):
                return int(path.name)
        except OSError:
            continue
    raise AssertionError("the server has no child")
