"""What is on disk: finds models in the repository's folders and reads one as a whole, or says why it cannot."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from hone.errors import InvalidRequest, ModelNotInRepository, NotFound, RepositoryError, Unsupported, written_in
from hone.protos import config_pb
from hone.repository.autocomplete import DEFAULT_MODEL_FILE
from hone.repository.config_json import config_from_json
from hone.repository.config_text import find_config, read_config
from hone.repository.definition import ModelDefinition
from hone.repository.files import is_ignored, reason_of, relative_path
from hone.repository.fingerprint import Fingerprints, list_files
from hone.repository.labels import read_labels
from hone.repository.layout import (
    DUPLICATE,
    UNREADABLE_ROOT,
    ModelFolder,
    check_model_name,
    choose_versions,
    model_names,
)
from hone.repository.override import OverrideFolders
from hone.repository.validation import validate
from hone.repository.warmup import WARMUP_FOLDER
from hone.types import LoadParameters

_log = logging.getLogger(__name__)

_NOTHING = LoadParameters()


class ModelRepository:
    """Models in one or more folders. It remembers digests of files and nothing of what is served.

    Every call reads the disk and may take as long as that takes; all are safe to make from several threads.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        config_name: str = "",
        allow_file_override: bool = False,
        fingerprints: Fingerprints | None = None,
        num_gpus: int = 0,
    ) -> None:
        """Raises NotFound where a root is no folder, ValueError where `config_name` is no plain name."""
        for root in roots:
            if not root.is_dir():
                raise NotFound(f"model repository '{root}' is not a folder")
        if "/" in config_name or config_name in (".", ".."):
            raise ValueError(f"config name: expected a plain name, found '{config_name}'")
        self._roots = tuple(roots)
        self._config_name = config_name
        self._allow_file_override = allow_file_override
        self._num_gpus = num_gpus
        self._fingerprints = fingerprints or Fingerprints()
        self._overrides = OverrideFolders()
        if allow_file_override:
            self._overrides.open()
        self._names: dict[Path, list[str]] = {}

    def scan(self) -> dict[str, ModelFolder | str]:
        """Every model's folder by name, or why it cannot be used. Reads folders, not files.

        While a root cannot be listed, the models last seen in it are reported as unusable rather than gone.
        """
        found: dict[str, ModelFolder | str] = {}
        seen: set[str] = set()
        all_readable = True
        for root in self._roots:
            readable = True
            try:
                self._names[root] = model_names(root)
            except OSError as problem:
                _log.warning("cannot list model repository %s: %s", root, reason_of(problem))
                readable = all_readable = False
            for name in self._names.get(root, ()):
                shown = name.encode("utf-8", "replace").decode("utf-8")
                if name in seen:
                    found[shown] = DUPLICATE
                    continue
                seen.add(name)
                if shown != name:
                    found[shown] = "expected a folder name in UTF-8"
                else:
                    found[name] = self._list(name, root / name) if readable else UNREADABLE_ROOT
        if all_readable:
            folders = [folder for folder in found.values() if isinstance(folder, ModelFolder)]
            self._fingerprints.keep_only((folder.path, folder.files) for folder in folders)
        return found

    def names(self) -> list[str]:
        """Names of all folders that may be models, sorted. Lists the roots only; one that cannot be listed counts as
        it was last seen."""
        found: set[str] = set()
        for root in self._roots:
            try:
                found.update(model_names(root))
            except OSError:
                found.update(self._names.get(root, ()))
        return sorted(name.encode("utf-8", "replace").decode("utf-8") for name in found)

    def read(self, name: str, parameters: LoadParameters = _NOTHING) -> ModelDefinition:
        """Read one model as a whole, with what a load request brought along in place of what is on disk.

        Raises InvalidRequest (name or parameters), Unsupported (file override is off), RepositoryError (not found, in
        several repositories, unreadable, not parsable) or ConfigError (a value is wrong).
        """
        check_model_name(name)
        if not parameters.files:
            return self._define(name, self._find(name), parameters.config)
        if not self._allow_file_override:
            raise Unsupported("model file override is disabled; start the server with --allow-file-override=true")
        if parameters.config is None:
            raise InvalidRequest("Load parameter 'config' must be specified for model file override")
        path = self._overrides.write(name, parameters.files)
        try:
            return self._define(name, path, parameters.config)
        except BaseException:
            self._overrides.remove(path)
            raise

    def release(self, definition: ModelDefinition) -> None:
        """Remove the files that came with the definition's load request, if any. Call it when no version needs them."""
        self._overrides.remove(definition.path)

    def close(self) -> None:
        """Remove the folders of all file overrides."""
        self._overrides.close()

    def _find(self, name: str) -> Path:
        found = []
        for root in self._roots if not is_ignored(name) else ():
            try:
                if (root / name).is_dir():
                    found.append(root / name)
            except OSError as problem:
                raise RepositoryError(name, f"cannot read the model's folder: {reason_of(problem)}") from problem
        if not found:
            raise ModelNotInRepository(name)
        if len(found) > 1:
            raise RepositoryError(name, DUPLICATE)
        return found[0]

    def _list(self, name: str, path: Path) -> ModelFolder | str:
        try:
            return ModelFolder(name, path, list_files(path), self._fingerprints)
        except OSError as problem:
            return f"cannot read the model's folder: {reason_of(problem)}"

    def _define(self, name: str, path: Path, override: str | None) -> ModelDefinition:
        folder = self._list(name, path)
        if isinstance(folder, str):
            raise RepositoryError(name, folder)
        try:
            config, config_file = self._config(name, path, override)
            with written_in(config_file):
                validate(config, name, self._num_gpus)
                labels = read_labels(path, config, name)
            versions = self._versions(folder, config)
        except OSError as problem:
            raise RepositoryError(name, f"cannot read the model's folder: {reason_of(problem)}") from problem
        definition = ModelDefinition(
            name=name,
            path=path,
            config=config,
            versions=versions,
            fingerprint=folder.fingerprint,
            version_fingerprints={version: folder.version_fingerprint(version) for version in versions},
            config_fingerprint=_config_fingerprint(folder, config),
            labels=labels,
            config_file=config_file,
        )
        if self._list(name, path) != folder:
            raise RepositoryError(name, "the model's files changed while they were read; load it again")
        return definition

    def _config(self, name: str, path: Path, override: str | None) -> tuple[config_pb.ModelConfig, str]:
        """With where it was written; see `ModelDefinition.config_file`."""
        if override is not None:
            config, config_file = config_from_json(override, name), "the load request"
        else:
            file = find_config(path, self._config_name)
            config = read_config(file, name) if file is not None else config_pb.ModelConfig()
            config_file = file.relative_to(path).as_posix() if file is not None else ""
        if config.name not in ("", name):
            raise RepositoryError(
                name,
                f"unexpected directory name '{name}' for model '{config.name}', directory name must equal model name",
            )
        config.name = name
        return config, config_file

    def _versions(self, folder: ModelFolder, config: config_pb.ModelConfig) -> dict[int, Path]:
        chosen, absent = choose_versions(folder, config.version_policy)
        for version in absent:
            _log.warning("model '%s': version %d of version_policy.specific has no folder", folder.name, version)
        if not chosen:
            raise InvalidRequest(
                f"at least one version must be available under the version policy of model '{folder.name}'"
            )
        file_name = relative_path(config.default_model_filename or DEFAULT_MODEL_FILE)
        versions = {}
        for version in chosen:
            file = folder.path / str(version) / file_name
            if file.is_dir():  # a large model: graph and weights in a folder of the file's name
                file = file / DEFAULT_MODEL_FILE
            if not file.is_file():
                raise RepositoryError(folder.name, f"version {version}: expected the model in '{file_name}', not found")
            versions[version] = file
        return versions


def _config_fingerprint(folder: ModelFolder, config: config_pb.ModelConfig) -> str:
    """Hash of what changes the answers without being part of a version."""
    labels = {output.label_filename for output in config.output}
    files = [
        entry for entry in folder.files if entry.relative.startswith(f"{WARMUP_FOLDER}/") or entry.relative in labels
    ]
    content = config.SerializeToString(deterministic=True) + folder.fingerprint_of(files).encode()
    return hashlib.sha256(content).hexdigest()
