"""How a repository is laid out: folders of models, in them folders of versions, in them the model's file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.errors import InvalidRequest, RepositoryError
from hone.repository.files import is_ignored, reason_of
from hone.repository.fingerprint import FileEntry, Fingerprints

#: Why a model is in no repository: it is in several.
DUPLICATE = "model appears in two or more repositories"
UNREADABLE_ROOT = "the model repository's folder cannot be read"

_VERSION = re.compile(r"[1-9][0-9]{0,18}")
_MAX_VERSION = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model as a listing of files. Listings compare equal while no file looks different, which costs no reading."""

    name: str
    path: Path
    files: tuple[FileEntry, ...]
    _fingerprints: Fingerprints = field(repr=False, compare=False)

    @property
    def fingerprint(self) -> str:
        """Hash of everything in the folder. Reads the files that are new or changed; raises RepositoryError."""
        return self.fingerprint_of(self.files)

    def version_fingerprint(self, version: int) -> str:
        """Hash of one version's files by their names in its folder, whatever its number. Raises RepositoryError."""
        prefix = f"{version}/"
        return self.fingerprint_of([entry for entry in self.files if entry.relative.startswith(prefix)], prefix)

    def fingerprint_of(self, files: Sequence[FileEntry], prefix: str = "") -> str:
        """Hash of some of the files, by their names behind `prefix`. Raises RepositoryError."""
        try:
            return self._fingerprints.of(self.path, files, prefix)
        except OSError as problem:
            raise RepositoryError(self.name, f"cannot read the model's files: {reason_of(problem)}") from problem

    def versions(self) -> list[int]:
        """Version folders that hold a file, lowest first. Other names, and leading zeros, are not versions."""
        names = {entry.relative.split("/", 1)[0] for entry in self.files if "/" in entry.relative}
        numbers = (int(name) for name in names if _VERSION.fullmatch(name))
        return sorted(number for number in numbers if number <= _MAX_VERSION)


def check_model_name(name: str) -> None:
    """Refuse names that cannot be a folder's, before anything is looked for. Raises InvalidRequest."""
    if not name.strip():
        raise InvalidRequest("Model name cannot be empty or contain only whitespace characters")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest("invalid model name, expected valid Unicode") from None
    if "/" in name or "\0" in name or name.strip() in (".", ".."):
        shown = name.replace("\0", "\\0")
        raise InvalidRequest(f"invalid model name '{shown}', model name must not contain path traversal characters")


def model_names(root: Path) -> list[str]:
    """Names of the folders in a repository, sorted, links to folders included. Raises OSError."""
    names = []
    with os.scandir(root) as entries:
        for entry in entries:
            try:
                if not is_ignored(entry.name) and entry.is_dir():
                    names.append(entry.name)
            except OSError:
                # A link that leads round in circles. It is no folder; a broken folder says so when it is listed.
                continue
    return sorted(names)


def choose_versions(folder: ModelFolder, policy: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Versions that the policy takes, and those it asks for by number that are not there."""
    present = folder.versions()
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return present, ()
    if choice == "specific":
        wanted = sorted(set(policy.specific.versions))
        return [v for v in wanted if v in present], [v for v in wanted if v not in present]
    count = (policy.latest.num_versions or 1) if choice == "latest" else 1
    return present[-count:], ()
