"""From an artifact that passed to one that serves: load, warm, one check of outputs, all off the request path."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Literal

from hone.engines.cuda_runtime import CudaError
from hone.errors import EngineBusy, HoneError
from hone.specialization import Specialization
from hone.tuning.gate import check_outputs
from hone.tuning.inputs import Domain, InputSet, draw
from hone.tuning.ports import EngineLoader, TunableVersion
from hone.tuning.record import Bucket
from hone.tuning.samples import repeated_rows
from hone.tuning.settings import ModelTuning
from hone.types import Array, Engine, EngineInstance

_log = logging.getLogger(__name__)

#: Of the inputs that the check is made on; not one of those that the gate saw.
_CHECK_SEED = 7
_NUM_WARM = 2
#: A model that is loaded onto a GPU may keep it busy for so long.
_BUSY_SECONDS, _BUSY_POLL_SECONDS = 120.0, 0.05
#: Pauses between pieces of work, as a multiple of what the piece took, and at most: each piece takes the interpreter
#: and a core from requests, which catch up meanwhile.
_REST_RATIO, _MAX_REST_SECONDS = 2.0, 0.02


@dataclass(frozen=True, slots=True)
class Refused:
    """The artifact is not to serve. With a `cause` it is to be quarantined: its outputs are wrong here, or it broke the
    device."""

    reason: str
    cause: Literal["", "outputs", "error"] = ""


def prepare(
    bucket: Bucket,
    domains: object,
    version: TunableVersion,
    tuning: ModelTuning,
    samples: Sequence[InputSet],
    load: EngineLoader,
    running: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Specialization | Refused:
    """An engine ready to serve. `domains` is what the artifact's manifest says of made-up inputs: a domain for each.
    Inside `running()` its code runs.

    The caller holds a lease on the version's baseline. Raises nothing; a refused engine is closed again.
    """
    inputs = _inputs(bucket, domains, samples, batching=version.max_batch_size > 0)
    if inputs is None:
        return Refused("there are no inputs to check its outputs with; give model_warmup data")
    began = time.perf_counter()
    try:
        with running():
            engine = load(bucket.digest, bucket.device, version)
    except HoneError as problem:
        return Refused(f"it could not be loaded: {problem}")
    began = _rest(began)
    refused = _check(engine, inputs, version, tuning, running)
    _rest(began)
    if refused is not None:
        with suppress(HoneError):
            engine.close()
        return refused
    min_rows = bucket.verdict.get("min_rows")
    rows = bucket.signature.rows if version.max_batch_size > 0 else 0
    return Specialization(
        bucket.signature,
        engine,
        bucket.digest,
        min_rows if isinstance(min_rows, int) and 0 < min_rows < rows else rows,
    )


def _rest(began: float) -> float:
    """Pause after a piece of work that began then. When the next one begins."""
    time.sleep(min(_REST_RATIO * (time.perf_counter() - began), _MAX_REST_SECONDS))
    return time.perf_counter()


def _check(
    engine: Engine,
    inputs: InputSet,
    version: TunableVersion,
    tuning: ModelTuning,
    running: Callable[[], AbstractContextManager[None]],
) -> Refused | None:
    names = [spec.name for spec in version.outputs]
    try:
        expected = version.baseline.instantiate().run(inputs.arrays, names)
        with running():
            instance = engine.instantiate()
            for _ in range(_NUM_WARM):
                found = _run(instance, inputs, names)
    except HoneError as problem:
        broke = isinstance(problem, CudaError) and problem.is_poisoning
        return Refused(f"it failed when it was warmed: {problem}", "error" if broke else "")
    checks = check_outputs(
        names,
        {spec.name: spec.datatype for spec in version.outputs},
        expected,
        found,
        precision=tuning.precision,
        tolerance=tuning.tolerance,
        inputs=inputs.name,
    )
    wrong = next((check for check in checks if not check.passed), None)
    return Refused(f"its outputs are wrong as loaded here: {wrong.reason}", "outputs") if wrong is not None else None


def _run(instance: EngineInstance, inputs: InputSet, names: Sequence[str]) -> list[Array]:
    """Waits where the engine cannot run at this moment."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            return instance.run(inputs.arrays, names)
        except EngineBusy:
            if time.monotonic() > deadline:
                raise
            time.sleep(_BUSY_POLL_SECONDS)


def _inputs(bucket: Bucket, told: object, samples: Sequence[InputSet], *, batching: bool) -> InputSet | None:
    if isinstance(told, dict):
        try:
            return draw({name: Domain.from_json(domain) for name, domain in told.items()}, _CHECK_SEED)
        except (KeyError, TypeError, ValueError):
            _log.warning("the inputs told in the manifest of artifact %s are not understood", bucket.digest)
    for sample in samples:
        arrays = sample.arrays
        if batching and all(array.ndim and array.shape[0] for array in arrays.values()):
            arrays = repeated_rows(arrays, bucket.signature.rows)
        if bucket.signature.fits(arrays):
            return InputSet(sample.name, dict(arrays))
    return None
