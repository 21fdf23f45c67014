"""The table docs/onnx_coverage.md, from the outcomes of `benchmarks.onnx_coverage`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from typing import Protocol

EXPANDED = "(definitions by other operators)"

#: How far a case came, by the stage that failed.
_IMPORTED = ("compile", "run", "match", "ok")
_COMPILED = ("run", "match", "ok")
_MAX_REASONS = 3
_MAX_REASON_LENGTH = 110


class Row(Protocol):
    """What the table needs of an outcome."""

    @property
    def case(self) -> str: ...
    @property
    def operators(self) -> tuple[str, ...]: ...
    @property
    def stage(self) -> str: ...
    @property
    def constants(self) -> bool: ...
    @property
    def blamed(self) -> str: ...
    @property
    def reason(self) -> str: ...


def render(outcomes: Sequence[Row]) -> str:
    """The whole document."""
    cases = [outcome for outcome in outcomes if outcome.case.startswith("test_")]
    models = [outcome for outcome in outcomes if not outcome.case.startswith("test_")]
    servable = [outcome for outcome in cases if outcome.stage != "reference"]
    matching = sum(outcome.stage == "ok" for outcome in servable)
    with_constants = sum(outcome.constants for outcome in servable if outcome.stage == "ok")
    packages = ", ".join(f"{name} {version(name)}" for name in ("apache-tvm", "onnx", "onnxruntime"))
    lines = [
        "# ONNX coverage",
        "",
        "Made by `make onnx-coverage`; do not edit. Every case goes through hone's importer and its own pipeline",
        "for the CPU (no search: each template has its first guess), runs on the engine that serves tuned models,",
        f"on two threads, and is compared with ONNX Runtime. With {packages}.",
        "",
        f"- ONNX has {len(cases)} operator cases. ONNX Runtime runs {len(servable)} of them on a CPU; the others",
        "  cannot be served at all, and are left out below.",
        f"- **{matching} of {len(servable)} ({matching / max(len(servable), 1):.0%}) import, compile and match.**",
        f"- {with_constants} of these do so only with all inputs but the first as constants, as models have them",
        "  (shapes, axes, paddings).",
        "",
        "A case that does not import is a state of the model (`unsupported`), one that does not match is refused by",
        "the gate: either way ONNX Runtime serves on. Not imported on purpose: outputs whose shape depends on values",
        "(NonZero, Unique, Compress, NonMaxSuppression), strings, sequences and optionals, training modes, recurrent",
        "layers and loops of more than 128 rounds, quantized LSTMs, branches that an input chooses and whose shapes",
        "differ, and operators of other domains than ONNX's own (but for a few of ONNX Runtime's).",
        "",
        "## Models",
        "",
        "| model | imports | compiles | matches | reason |",
        "|---|---|---|---|---|",
    ]
    lines += [_line(outcome.case, [outcome]) for outcome in models]
    lines += [
        "",
        "## Operators",
        "",
        "| operator | cases | imports | compiles | matches | reason |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[Row]] = defaultdict(list)
    for outcome in servable:
        groups[outcome.operators[0] if len(outcome.operators) == 1 else EXPANDED].append(outcome)
    for operator in sorted(groups, key=lambda name: (name == EXPANDED, name)):
        lines.append(_line(operator, groups[operator], num_cases=True))
    return "\n".join(lines) + "\n"


def _line(name: str, outcomes: Sequence[Row], *, num_cases: bool = False) -> str:
    counts = (
        sum(outcome.stage in _IMPORTED for outcome in outcomes),
        sum(outcome.stage in _COMPILED for outcome in outcomes),
        sum(outcome.stage == "ok" for outcome in outcomes),
    )
    if num_cases:
        cells = [name, str(len(outcomes)), *map(str, counts), _reasons(outcomes)]
    else:
        cells = [name, *("yes" if count else "no" for count in counts), _reasons(outcomes)]
    return "| " + " | ".join(cells) + " |"


def _reasons(outcomes: Sequence[Row]) -> str:
    """The most frequent reasons, short."""
    found = Counter(_short(outcome) for outcome in outcomes if outcome.stage != "ok")
    texts = [f"{text} ({count})" if count > 1 else text for text, count in found.most_common(_MAX_REASONS)]
    return "; ".join(texts + (["…"] if len(found) > _MAX_REASONS else []))


def _short(outcome: Row) -> str:
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : |\S*/\S+:\d+:? ?", "", outcome.reason)
    text = text.removeprefix("ONNX Runtime: ").replace("|", "/").replace("\n", " ").strip()
    text = text if len(text) <= _MAX_REASON_LENGTH else text[:_MAX_REASON_LENGTH].rstrip() + "…"
    return f"{outcome.stage}: {text}"
