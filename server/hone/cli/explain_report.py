"""What `hone explain` prints for people."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

#: Rows of a table; `--json` has them all.
_MAX_ROWS = 40
_SHOWN_LOST = 12
_SHOWN_OPERATORS = 8
_WIDTH = 180
#: What the gate measured of a module, and what people call it.
_GATED = (("tuned_us", "tuned"), ("baseline_us", "on its baseline"))


def print_explanation(told: Mapping[str, Any]) -> None:
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    console.print(headline(told), highlight=False)
    for one in told.get("gpus", ()):
        _print_kept_for_gpu(console, told["signature"], one)
    if "tuned" in told or "unsupported" in told:
        _print_profiled(console, told)


def _print_profiled(console: Any, told: Mapping[str, Any]) -> None:
    from rich.table import Table

    if "unsupported" in told:
        console.print(f"The compiler does not take it: {told['unsupported']}", highlight=False)
        return
    tuned, baseline = told["tuned"], told["baseline"]
    limits = told["roofline"]
    console.print(f"{told['signature']} at {told['precision']}", highlight=False)
    if told["lowering"] is not None:
        _print_kept(console, told["lowering"])
    console.print(
        f"tuned {tuned['microseconds'] / 1e3:.3f} ms (between calls {tuned['overhead_microseconds']:.1f} us), "
        f"ONNX Runtime {baseline['microseconds'] / 1e3:.3f} ms; "
        f"limits of this machine {limits['gflops']:.0f} GFLOP/s in f32 and {limits['gflops_bf16']:.0f} in bf16, "
        f"{limits['num_threads']} threads",
        highlight=False,
    )
    if tuned["in_place"]:
        parts = sum(one["num_in_place"] for one in tuned["in_place"])
        saved = sum(one["bytes_in_place"] for one in tuned["in_place"])
        console.print(
            f"{len(tuned['in_place'])} concatenations are fused into what computes their parts: {parts} parts, "
            f"{saved / 1e6:.1f} MB, are written in place",
            highlight=False,
        )
    groups = Table(title="tuned, in the order of execution")
    for column in ("group", "layout", "in", "template", "parameters", "us", "share", "GFLOP/s", "of limit"):
        groups.add_column(column, justify="right" if column in ("us", "share", "GFLOP/s", "of limit") else "left")
    shown = sorted(tuned["groups"], key=lambda one: -one["microseconds"])[:_MAX_ROWS]
    for one in tuned["groups"]:
        if one in shown:
            groups.add_row(
                one["what"],
                one["layout"],
                one["precision"],
                one["template"],
                _parameters(one),
                f"{one['microseconds']:.1f}",
                f"{one['share']:.1%}",
                f"{one['gflops']:.0f}" if one["gflops"] else "",
                "" if one["of_roofline"] is None else f"{one['of_roofline']:.0%}",
            )
    console.print(groups)
    if len(tuned["groups"]) > len(shown):
        console.print(f"and {len(tuned['groups']) - len(shown)} shorter ones (--json has all)", highlight=False)
    layers = Table(title="by layer, against ONNX Runtime")
    for column in ("layer", "tuned us", "ONNX Runtime us", "ratio"):
        layers.add_column(column, justify="left" if column == "layer" else "right")
    for layer in told["layers"]:
        ratio = layer["baseline_us"] / layer["tuned_us"] if layer["tuned_us"] else float("inf")
        layers.add_row(layer["what"], f"{layer['tuned_us']:.1f}", f"{layer['baseline_us']:.1f}", f"{ratio:.2f}")
    console.print(layers)
    console.print(f"ONNX Runtime by operator: {_by_operator(baseline['nodes'])}", highlight=False)
    lost = [layer for layer in told["layers"] if layer["lost"]]
    if lost:
        names = ", ".join(
            f"{layer['what']} ({layer['tuned_us'] - layer['baseline_us']:+.1f} us)" for layer in lost[:_SHOWN_LOST]
        )
        console.print(f"Lost to the baseline: {names}", highlight=False)


def _print_kept_for_gpu(console: Any, signature: str, one: Mapping[str, Any]) -> None:
    """A module for a GPU as its artifact tells of it."""
    from rich.table import Table

    state = "it serves here" if one["serves"] else "it is kept, and does not serve here"
    if not one["current"]:
        state += "; another version of hone made it"
    how = ", made with plain schedules and without a search" if one["plain"] else ""
    times = [f"{one[name] / 1e3:.3f} ms {what}" for name, what in _GATED if one[name] is not None]
    console.print(
        f"{signature} at {one['precision']} on {one['device'] or 'a GPU that the cache does not name'}{how}: {state}. "
        + (f"When the gate measured it there: {', '.join(times)}. " if times else "")
        + "Times below are those of the search, each call alone; nothing was run for this.",
        highlight=False,
    )
    groups = Table(title="kernels and functions of the module")
    for column in ("group", "template", "parameters", "calls", "us", "share", "GFLOP/s", "of limit"):
        groups.add_column(column, justify="left" if column in ("group", "template", "parameters") else "right")
    shown = sorted(one["groups"], key=lambda group: -(group["microseconds"] or 0.0))[:_MAX_ROWS]
    for group in shown:
        groups.add_row(
            (f"{group['what']}\n({group['note']})" if group["note"] else group["what"]),
            group["template"],
            _parameters(group),
            str(group["num_calls"]),
            _shown(group["microseconds"], ".1f"),
            _shown(group["share"], ".1%"),
            _shown(group["gflops"], ".0f"),
            _shown(group["of_roofline"], ".0%"),
        )
    console.print(groups)
    if len(one["groups"]) > len(shown):
        console.print(f"and {len(one['groups']) - len(shown)} shorter ones (--json has all)", highlight=False)
    console.print(
        f"measured one by one: {one['measured_us'] / 1e3:.3f} ms; functions without a time and what is between calls: "
        f"{one['rest_us'] / 1e3:.3f} ms ({one['rest_share']:.1%})",
        highlight=False,
    )


def _parameters(group: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in group["parameters"].items())


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _print_kept(console: Any, lowering: Mapping[str, Any]) -> None:
    """Which layers are kept in float32, and what each does to the outputs when it is not."""
    from rich.table import Table

    console.print(
        f"With all of its {lowering['num_layers']} layers in {lowering['precision']} its outputs would be off by "
        f"{lowering['whole']:.2f} times what is allowed; with {len(lowering['kept'])} of them in f32 they are by "
        f"{lowering['error']:.2f}",
        highlight=False,
    )
    kept = Table(title="kept in f32")
    for column in ("layer", "what", "its error alone"):
        kept.add_column(column, justify="left" if column == "what" else "right")
    for one in lowering["kept"]:
        kept.add_row(str(one["layer"]), one["what"], f"{one['effect']:.2f}")
    console.print(kept)


def headline(told: Mapping[str, Any]) -> str:
    bucket = told["bucket"]
    if bucket is None:
        state = "this signature was not tuned here"
    elif bucket["engine"] == "tvm":
        state = f"promoted, {bucket['speedup']:.2f} times as fast as the baseline when it was measured"
    else:
        state = f"not promoted: {bucket['reason'] or bucket['outcome'] or 'nothing in the cache'}"
    return f"{told['model']} version {told['version']}: {state}"


def _by_operator(nodes: Sequence[Mapping[str, Any]]) -> str:
    shares: Counter[str] = Counter()
    for node in nodes:
        shares[node["op"]] += node["share"]
    return ", ".join(f"{op} {share:.1%}" for op, share in shares.most_common(_SHOWN_OPERATORS))
