"""Serving and the cache as the tuner sees them, in memory; children are real processes that follow a script."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hone.errors import EngineError
from hone.kernels import Entry
from hone.specialization import Signature, Specialization, VersionRef
from hone.tuning.budget import Budget
from hone.tuning.holding import OperatorHolds
from hone.tuning.inputs import Domain
from hone.tuning.options import Device, TunerOptions
from hone.tuning.ports import TunableVersion
from hone.tuning.probation import Probation
from hone.tuning.signatures import Traffic
from hone.tuning.tuner import Tuner
from hone.tuning.verdicts import Recalled
from hone.tuning.watch import Watch, WatchOptions
from hone.types import TensorSpec

SCRIPT = (sys.executable, str(Path(__file__).parents[2] / "process" / "tuning_script.py"))
PASS = {"outcome": "passed"}


class Engine:
    """OUT = factor * IN; `broken` makes runs fail."""

    def __init__(self, factor: float = 2.0, shape: tuple[int, ...] = (-1, 4), kind: str = "fake") -> None:
        self.kind = kind
        self.factor = factor
        self.inputs = (TensorSpec("IN", "FP32", shape),)
        self.outputs = (TensorSpec("OUT", "FP32", shape),)
        self.initializers: tuple[TensorSpec, ...] = ()
        self.is_steady = False
        self.broken = False
        self.num_runs = 0
        self.closed = False

    def instantiate(self) -> Engine:
        return self

    def run(self, inputs, outputs):
        assert not self.closed
        self.num_runs += 1
        if self.broken:
            raise EngineError("told to fail")
        return [np.asarray(inputs["IN"] * np.float32(self.factor)) for _ in outputs]

    def close(self) -> None:
        self.closed = True


class Serving:
    """`ServedModels` and `Promotion` together: what is loaded, and which generation runs a signature."""

    def __init__(self) -> None:
        self.versions: dict[VersionRef, TunableVersion] = {}
        self.routes: dict[tuple[VersionRef, str, Signature], list[tuple[int, Specialization]]] = {}
        self.swaps: list[list[str]] = []
        self._next = 1

    def tunable(self) -> Sequence[TunableVersion]:
        return list(self.versions.values())

    def promote(self, ref: VersionRef, specializations: Sequence[Specialization]) -> Mapping[Signature, int] | None:
        if ref not in self.versions:
            return None
        generations = {}
        for one in specializations:
            device = one.artifact.split("/")[2] if "/" in one.artifact else "cpu"
            stack = self.routes.setdefault((ref, device, one.signature), [])
            stack.append((self._next, one))
            generations[one.signature] = self._next
            self._next += 1
        self.swaps.append([one.signature.text for one in specializations])
        return generations

    def roll_back(self, ref: VersionRef, generation: int) -> bool:
        for stack in self.routes.values():
            for at, (number, _) in enumerate(stack):
                if number == generation:
                    stack.pop(at)[1].engine.close()
                    return True
        return False

    @contextmanager
    def lease(self, ref: VersionRef, generation: int = 0):
        running = {stack[-1][0] for (of, *_), stack in self.routes.items() if of == ref and stack}
        yield ref in self.versions and generation in running | {0}

    # --- for tests

    def load(self, path: Path, model: str = "m", version: int = 1, graph: str = "g1", **fields) -> VersionRef:
        ref = VersionRef(model, version, graph)
        fields.setdefault("baseline", Engine())
        fields.setdefault("max_batch_size", 4)
        self.versions[ref] = TunableVersion(ref, path, **fields)
        return ref

    def unload(self, ref: VersionRef) -> None:
        self.versions.pop(ref).baseline.close()
        for key in [key for key in self.routes if key[0] == ref]:
            del self.routes[key]

    def running(self, device: str = "cpu") -> dict[str, int]:
        """Signature -> generation, of those that run tuned."""
        return {key[2].text: stack[-1][0] for key, stack in self.routes.items() if stack and key[1] == device}


class Cache:
    """Memory and quarantine of all kinds of devices."""

    def __init__(self, published: Path) -> None:
        self._published = published
        """Digests that children published, a line each."""
        self.known: dict[str, Recalled] = {}
        self.out: dict[str, str] = {}
        self.strikes: dict[tuple[str, str], int] = {}
        self.recalls: list[str] = []
        self.withdrawn: list[str] = []

    def recall(self, digest: str) -> Recalled:
        self.recalls.append(digest)
        if digest in self.out:
            return Recalled("quarantined", self.out[digest])
        published = self._published.read_text(encoding="utf-8").splitlines() if self._published.exists() else []
        if digest in published and digest not in self.known:
            self.put(digest)
        return self.known.get(digest, Recalled("absent"))

    def withdraw(self, digest: str) -> None:
        self.withdrawn.append(digest)
        if digest in self.known and self.known[digest].state in ("refused", "unsupported"):
            del self.known[digest]

    def quarantine(self, digest, scope, reason, cause="quarantine"):
        self.out[digest] = reason

    def strike(self, digest, scope, cause, reason, *, limit=2):
        self.strikes[digest, cause] = self.strikes.get((digest, cause), 0) + 1
        if self.strikes[digest, cause] >= limit:
            self.out[digest] = reason
        return SimpleNamespace(reason=self.out.get(digest))

    def put(self, digest: str, state: str = "passed", verdict: Mapping[str, Any] | None = None) -> None:
        domain = {"IN": Domain("FP32", (1, 4), -1, 1).to_json()}
        entry = Entry("artifacts", "cpu", digest, Path(), {}, {"domains": domain}, "", 0, state == "passed", 0)
        self.known[digest] = Recalled(state, "", verdict or {"speedup": 2.0}, entry)  # type: ignore[arg-type]


class Rig:
    """A tuner with all its neighbours. Its clock moves only when told, unless another is given."""

    def __init__(
        self,
        folder: Path,
        *,
        kinds: Sequence[tuple[str, str]] = (("cpu:0", "cpu"),),
        clock: Callable[[], float] | None = None,
        utc: Callable[[], str] = lambda: "now",
        plain: bool = False,
        **options,
    ) -> None:
        self.folder = folder
        self.serving = Serving()
        self.cache = Cache(folder / "published")
        self.traffic = Traffic()
        self.engines: dict[str, Engine] = {}
        self.make_engine: Callable[[str], Engine] = lambda digest: Engine(kind="tvm")
        self.now = 1000.0
        clock = clock or (lambda: self.now)
        self.heard: list[dict[str, Any]] = []
        self.probation = Probation(folder / "probation")
        options.setdefault("budget", Budget(pause=False, silence_seconds=60.0, seconds=60.0))
        options.setdefault("command", SCRIPT)
        self.options = TunerOptions(**options)
        self.watch = Watch(self.serving, options=WatchOptions(sample_interval_seconds=0.0), clock=clock)
        self.tuner = Tuner(
            self.serving,
            self.serving,
            devices=[Device(name, key, kind=key) for name, key in kinds],
            memories={key: self.cache for _, key in kinds},
            quarantine=self.cache,
            key_of=lambda version, tuning, signature, device: self.key(
                version.ref, signature.text, device, tuning.precision
            ),
            plain_key_of=self._plain_key_of if plain else None,
            load=self._load,
            watch=self.watch,
            probation=self.probation,
            traffic=self.traffic,
            options=self.options,
            holds=OperatorHolds(folder / "holds"),
            listener=self._hear,
            clock=clock,
            utc=utc,
            num_cores=2,
        )

    @staticmethod
    def key(ref: VersionRef, signature: str, device: str = "cpu", precision: str = "f32") -> str:
        return f"{ref.graph}/{signature}/{device}/{precision}"

    def _plain_key_of(self, version: TunableVersion, tuning: object, signature: Signature, device: str) -> str:
        return self.plain_key(version.ref, signature.text, device)

    @staticmethod
    def plain_key(ref: VersionRef, signature: str, device: str = "gpu") -> str:
        return f"{ref.graph}/{signature}/{device}/plain"

    def _load(self, artifact: str, device: str, version: TunableVersion) -> Engine:
        made = self.engines[artifact] = self.make_engine(artifact)
        return made

    def _hear(self, event: dict[str, Any]) -> None:
        self.heard.append(event)

    def model(self, script: Mapping[str, Any], name: str = "m", **fields) -> VersionRef:
        """Load a model whose child follows the script; what passes is in the cache by then."""
        path = self.folder / f"{name}.onnx"
        Path(f"{path}.script.json").write_text(json.dumps(script), encoding="utf-8")
        return self.serving.load(path, name, **fields)

    def children(self, name: str = "m") -> list[list[list[str]]]:
        """The tasks (digest, mode) of each child that was started for the model."""
        path = self.folder / f"{name}.onnx.children"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def run(self) -> None:
        """Steps until there is nothing to do."""
        self.tuner.wake()
        while self.tuner.step():
            pass

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def status(self, name: str = "m", version: str = "") -> dict[str, Any]:
        return self.tuner.status(name, version)

    def buckets(self, name: str = "m") -> dict[str, dict[str, Any]]:
        return {bucket["signature"]: bucket for bucket in self.status(name)["buckets"]}

    def events(self, name: str = "m") -> list[str]:
        return [line["event"] for line in self.status(name)["history"]]
