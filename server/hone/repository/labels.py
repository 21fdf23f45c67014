"""Names of an output's classes: one a line in `label_filename`, by which the classification extension answers."""

from __future__ import annotations

from pathlib import Path

from hone.errors import ConfigError
from hone.protos import config_pb
from hone.repository.files import read_limited, reason_of, relative_path

_MAX_LABEL_BYTES = 16 * 1024 * 1024


def read_labels(folder: Path, config: config_pb.ModelConfig, model: str) -> dict[str, tuple[str, ...]]:
    """Labels by output name, for the outputs that have a file. Raises ConfigError."""
    labels: dict[str, tuple[str, ...]] = {}
    for i, output in enumerate(config.output):
        if not output.label_filename:
            continue
        field = f"output[{i}].label_filename"
        try:
            text = read_limited(folder / relative_path(output.label_filename), _MAX_LABEL_BYTES).decode("utf-8-sig")
        except OSError as problem:
            raise ConfigError(model, field, f"cannot read '{output.label_filename}': {reason_of(problem)}") from problem
        except UnicodeDecodeError as problem:
            line = problem.object.count(b"\n", 0, problem.start) + 1
            raise ConfigError(
                model, field, f"expected UTF-8 text in '{output.label_filename}', line {line} is not"
            ) from problem
        lines = text.removesuffix("\n").split("\n") if text else []
        labels[output.name] = tuple(line.removesuffix("\r") for line in lines)
    return labels
