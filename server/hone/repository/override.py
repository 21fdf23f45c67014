"""Model files that a load request brings along, kept in a private temporary folder while the model is served."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from hone.errors import RepositoryError
from hone.repository.config_text import CONFIG_FILE
from hone.repository.files import reason_of, relative_path

_MAX_OVERRIDE_FILES = 1000


_PREFIX = "hone-override-"
_LOCK_FILE = ".lock"


class OverrideFolders:
    """The folders made from load requests. Safe to use from several threads: each call has a folder of its own.

    They lie in one folder of this process, in which it holds a lock while it lives: so folders of servers that were
    killed can be told from those of living ones, and are removed when the next one needs folders of its own.
    """

    def __init__(self) -> None:
        self._folders: set[Path] = set()
        self._root: Path | None = None
        self._lock = -1
        self._guard = threading.Lock()

    def open(self) -> None:
        """Remove what killed servers left behind."""
        for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if left.lstat().st_uid != os.getuid() or left.is_symlink():
                    continue
                descriptor = os.open(left / _LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its server lives
                    shutil.rmtree(left, ignore_errors=True)
                finally:
                    os.close(descriptor)

    def _make(self) -> Path:
        with self._guard:
            if self._root is None:
                root = Path(tempfile.mkdtemp(prefix=_PREFIX))
                self._lock = os.open(root / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                self._root = root
            folder = Path(tempfile.mkdtemp(dir=self._root))
            self._folders.add(folder)
            return folder

    def write(self, model: str, files: Mapping[str, bytes]) -> Path:
        """A new folder, for this user only, with these files in it. Raises RepositoryError, leaving nothing behind."""
        paths = _checked_paths(model, files)
        try:
            folder = self._make()
        except OSError as problem:
            raise RepositoryError(model, f"cannot store the files of the request: {reason_of(problem)}") from problem
        try:
            for name, path in paths.items():
                target = folder / path
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(files[name])
        except BaseException as problem:
            self.remove(folder)
            if not isinstance(problem, OSError):
                raise
            raise RepositoryError(model, f"cannot store the files of the request: {reason_of(problem)}") from problem
        return folder

    def __contains__(self, folder: Path) -> bool:
        return folder in self._folders

    def remove(self, folder: Path) -> None:
        """Delete a folder that `write` made; others are left alone."""
        with self._guard:
            if folder not in self._folders:
                return
            self._folders.discard(folder)
            shutil.rmtree(folder, ignore_errors=True)
            if not self._folders and self._root is not None:
                shutil.rmtree(self._root, ignore_errors=True)
                os.close(self._lock)
                self._root, self._lock = None, -1

    def close(self) -> None:
        for folder in list(self._folders):
            self.remove(folder)


def _checked_paths(model: str, files: Mapping[str, bytes]) -> dict[str, Path]:
    if len(files) > _MAX_OVERRIDE_FILES:
        raise RepositoryError(model, f"the request has {len(files)} files, expected at most {_MAX_OVERRIDE_FILES}")
    paths: dict[str, Path] = {}
    for name in files:
        try:
            paths[name] = relative_path(name)
        except ValueError as problem:
            shown = name.encode("utf-8", "replace").decode("utf-8").replace("\0", "\\0")
            raise RepositoryError(model, f"invalid file parameter 'file:{shown}': {problem}") from problem
        if name == CONFIG_FILE:
            raise RepositoryError(
                model, f"invalid file parameter 'file:{name}': the config comes from the parameter 'config'"
            )
    folders = {parent for path in paths.values() for parent in path.parents}
    for name, path in paths.items():
        if path in folders:
            raise RepositoryError(model, f"invalid file parameter 'file:{name}': another file has it as its folder")
    return paths
