"""Runs rows of kernels: each is compared with float64, then timed in turns with its rivals."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from benchmarks.gpu.journal import CRASHED, TRYING, Journal
from benchmarks.gpu.reference import Array, dtype_of, error_of, expected_of, operands_of, tolerance

ROUNDS = 5
_MAX_SETS = 64
#: Only compared with float64; timed once, for what it is worth.
_CHECKED = "B0"


class Lost(Exception):
    """A kernel broke the device's context: this process can run nothing more."""


class Bench:
    """`deadline` by `time.monotonic`. What is found goes to the journal."""

    def __init__(self, folder: Path, place: Any, journal: Journal, deadline: float) -> None:
        self._folder, self._place, self._journal, self._deadline = folder, place, journal, deadline
        self._modules: dict[str, Any] = {}

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Those that the journal has no result of, while there is time. Raises Lost."""
        done = {entry["name"] for entry in self._journal.entries("row", CRASHED)}
        for row in rows:
            if row["name"] in done:
                continue
            if time.monotonic() > self._deadline:
                return
            self._row(row)

    def _row(self, row: Mapping[str, Any]) -> None:
        place, name = self._place, row["name"]
        self._journal.add(TRYING, name)
        arrays = operands_of(row)
        expected, allowed = expected_of(row, arrays, place), tolerance(row)
        is_checked = row["table"] == _CHECKED
        arguments = [place.put(array) for array in arrays]
        num_bytes = sum(array.nbytes for array in arrays)
        copies = 1 if is_checked else min(_MAX_SETS, 1 + 2 * place.cache_bytes // max(1, num_bytes))
        sets = [arguments, *([place.copy(one) for one in arguments] for _ in range(copies - 1))]
        output = place.empty(*row["output"])
        samples: dict[str, Callable[[], float]] = {}
        worst = 0.0
        crashed = {entry["name"] for entry in self._journal.entries(CRASHED)}
        for told in row["kernels"]:
            label = f"{name}: {told['candidate']}"
            if time.monotonic() > self._deadline:
                break
            if label in crashed:
                continue
            self._journal.add(TRYING, label)
            try:
                call = self._caller(told, sets, arrays, output)
                place.poison(output)
                with place.launching():
                    call(0)
                error = error_of(place.get(output), expected)
                if not error <= allowed:
                    self._journal.add("wrong", label, error=error, allowed=allowed)
                    continue
                samples[told["candidate"]] = place.time(call)
            except Exception as problem:  # a kernel may refuse a card, in many ways: the others go on
                reason = str(problem).strip().splitlines() or [type(problem).__name__]
                self._journal.add("failed", label, reason=reason[0])
                print(f"  {label}: {reason[0]}", file=sys.stderr, flush=True)
                if place.is_lost():
                    raise Lost(label) from problem
                continue
            worst = max(worst, error)
        self._journal.add(TRYING, name)
        usual = self._times(row, samples, sets, 1 if is_checked else ROUNDS)
        ours = {name: us for name, us in usual.items() if name not in ("vendor", "padding")}
        best = min(ours, key=lambda name: ours[name], default="")
        self._journal.add(
            "row",
            name,
            us=ours.get(best),
            kernel=best,
            vendor_us=usual.get("vendor"),
            padding_us=usual.get("padding", 0.0),
            error=worst,
            allowed=allowed,
            num_kernels=len(ours),
        )

    def _caller(
        self, told: Mapping[str, Any], sets: Sequence[Sequence[Any]], arrays: Sequence[Array], output: Any
    ) -> Callable[[int], None]:
        """Calls the kernel on one set after the other. Weights that it wants in another order are put so before."""
        place, digest = self._place, told["digest"]
        if digest not in self._modules:
            self._modules[digest] = tvm_ffi.load_module(str(self._folder / "kernels" / f"{digest}.so"))
        kernel = self._modules[digest][f"hone_kernel_{digest}"]
        packed = {}
        for at, order in told["packed"].items():
            places = np.load(self._folder / "orders" / f"{order}.npy")
            packed[int(at)] = place.put(arrays[int(at)].reshape(-1)[places])
        workspace = place.empty((told["workspace"],), "uint8")
        held = [[*(packed.get(at, one) for at, one in enumerate(some)), workspace, output] for some in sets]
        arguments = [[place.argument(one) for one in some] for some in held]

        def call(at: int) -> None:
            kernel(*arguments[at % len(arguments)])

        call.held = held  # type: ignore[attr-defined]  # as long as the function
        return call

    def _times(
        self,
        row: Mapping[str, Any],
        samples: dict[str, Callable[[], float]],
        sets: Sequence[Sequence[Any]],
        num_rounds: int,
    ) -> dict[str, float]:
        """Medians of microseconds, of rounds in which all take turns: what disturbs one disturbs all."""
        place = self._place
        if row["table"] != _CHECKED and place.vendor(row, sets[0]) is not None:
            rivals = [place.vendor(row, one) for one in sets]
            samples["vendor"] = place.time(lambda at: rivals[at % len(rivals)]())
        if row["pads"]:
            narrow = place.put(np.ones(row["pads"], dtype_of(row["inputs"][0][1])))
            padding = place.pad(narrow, row["inputs"][0][0][-1])
            samples["padding"] = place.time(lambda at: padding())
        times: dict[str, list[float]] = {name: [] for name in samples}
        for _ in range(num_rounds):
            for name, sample in samples.items():
                times[name].append(sample())
        return {name: statistics.median(taken) for name, taken in times.items()}
