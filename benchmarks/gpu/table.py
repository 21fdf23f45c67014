"""The table that a run prints, out of the bundle's rows and the journal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

_CHECKED = "B0"


class Table:
    """`results` by name, as the journal has them; `rows` are the bundle's."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], results: Mapping[str, Mapping[str, Any]]) -> None:
        self._rows = {row["name"]: row for row in rows}
        self._results = results

    def checked(self) -> list[str]:
        """B0: how far off each family is."""
        lines = []
        for name, row in self._rows.items():
            result = self._results.get(name)
            if row["table"] != _CHECKED or result is None:
                continue
            if not result["num_kernels"]:
                lines.append(f"{_CHECKED}  {name[:41]:42}{'no kernel was right':>30}")
                continue
            lines.append(
                f"{_CHECKED}  {name[:41]:42}{result['us']:10.1f}{result['error']:10.1e}{result['allowed']:10.1e}"
            )
        head = f"{'':4}{'against float64':42}{'us':>10}{'error':>10}{'allowed':>10}"
        return [head, *lines] if lines else []

    def compared(self, name: str) -> tuple[str, float | None]:
        """With what a row is compared, and microseconds of that."""
        row, result = self._rows[name], self._results[name]
        if not row["parts"]:
            return "vendor", result["vendor_us"]
        parts = [self._results[part] for part in row["parts"] if part in self._results]
        if len(parts) < len(row["parts"]) or any(part["us"] is None for part in parts):
            return "its parts", None
        total = sum(part["us"] for part in parts)
        if row["table"] == "B3":
            # Apart: our plain kernel, then the item-wise operators as PyTorch has them, which is vendor less plain.
            plain = parts[0]["vendor_us"]
            if plain is None or result["vendor_us"] is None:
                return "unfused", None
            return "unfused", total + max(0.0, result["vendor_us"] - plain)
        return ("unpadded" if row["pads"] else "two kernels"), total

    def timed(self) -> list[str]:
        """B1 to B6."""
        lines, ratios = [], dict[str, list[float]]()
        for name, row in self._rows.items():
            result = self._results.get(name)
            if row["table"] == _CHECKED or result is None:
                continue
            ours = result["us"]
            against, other = self.compared(name)
            shown = [f"{row['table']:4}{name[:41]:42}"]
            if ours is None:
                lines.append(f"{shown[0]}{'no kernel ran':>19}")
                continue
            ours += result["padding_us"]
            ratio = other / ours if other else None
            if ratio is not None and (row["parts"] or row["table"] in ("B1", "B2")):
                ratios.setdefault(f"{row['table']} against {against}", []).append(ratio)
            shown.append(f"{ours:10.1f}{flops_of(row) / ours / 1e6:9.1f}  {against:12}")
            shown.append(f"{other:10.1f}{ratio:8.2f}" if other and ratio else f"{'-':>10}{'-':>8}")
            lines.append("".join([*shown, f"{result['error']:9.1e}"]))
        head = f"{'':4}{'row':42}{'ours us':>10}{'TFLOP/s':>9}  {'against':12}{'us':>10}{'ratio':>8}{'error':>9}"
        means = [
            f"geometric mean, {what}: {geometric(found):.2f} ({len(found)} rows)" for what, found in ratios.items()
        ]
        return [head, *lines, *means] if lines else []


def models_table(models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """B7: milliseconds a run from host memory to host memory; the ratio is to the faster of PyTorch's two."""
    lines, ratios = [], []
    for name, told in models.items():
        times = told["ms"]
        other = min(times[way] for way in ("graph", "compile") if way in times)
        ratios.append(other / times["ours"])
        compiled = f"{times['compile']:12.3f}" if "compile" in times else f"{'-':>12}"
        errors = f"{told['error']:10.1e}{told['torch_error']:10.1e}"
        lines.append(
            f"B7  {name[:27]:28}{times['ours']:10.3f}{times['graph']:10.3f}{compiled}{ratios[-1]:8.2f}{errors}"
        )
    if not lines:
        return []
    head = f"{'':4}{'model, batch':28}{'ours ms':>10}{'graph ms':>10}{'compile ms':>12}{'ratio':>8}"
    head += f"{'error':>10}{'PyTorch':>10}"
    mean = f"geometric mean, B7 against the faster of PyTorch's: {geometric(ratios):.2f} ({len(ratios)} rows)"
    return [head, *lines, mean]


def flops_of(row: Mapping[str, Any]) -> float:
    """Of the problem as it is asked for: what padding adds counts for nothing."""
    shapes: list[list[int]] = [shape for shape, _ in row["inputs"]]
    output: list[int] = row["output"][0]
    if row["op"] == "matmul":
        return 2.0 * math.prod(output) * shapes[0][-1]
    if row["op"] == "matmul_matmul":
        return 2.0 * math.prod(shapes[0][:-1]) * (math.prod(shapes[1]) + math.prod(shapes[2]))
    channels: int = row["pads"][-1] if row["pads"] else shapes[1][3]
    first = 2.0 * math.prod(output[:3]) * math.prod(shapes[1][:3]) * channels
    return first + (2.0 * math.prod(output) * shapes[2][3] if row["op"] == "conv2d_conv2d" else 0.0)


def geometric(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))
