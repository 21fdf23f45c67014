"""A model as read from disk, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hone.protos import config_pb


@dataclass(frozen=True, slots=True, eq=False)
class ModelDefinition:
    """What is to be served, all of it checked but for the graphs themselves.

    `config` is what the user wrote, under the model's name: validated, not completed. `versions` maps each version
    that the version policy chose to its model file. `config_file` is where the config was written, by its path in the
    model's folder ("the load request" where it came with one, empty where there is none). The fingerprints are hashes
    of contents: `fingerprint` of everything in the model's folder, `version_fingerprints` of each version's folder
    (graph and weights), `config_fingerprint` of what else changes the answers (config, labels, warm-up data).
    """

    name: str
    path: Path
    config: config_pb.ModelConfig
    versions: Mapping[int, Path]
    fingerprint: str
    version_fingerprints: Mapping[int, str]
    config_fingerprint: str
    labels: Mapping[str, tuple[str, ...]]
    config_file: str = ""
