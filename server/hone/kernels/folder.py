"""hone's own folder inside the one that the user gave: checked before anything in it is trusted."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hone.errors import ErrorKind, HoneError
from hone.kernels.digest import is_digest
from hone.kernels.entry import KINDS, RESERVED, SCHEMA, EntryName, check_scope
from hone.kernels.files import FOLDER_MODE, NotPrivate, check_private, make_folders, reason_of, sync_folder

logger = logging.getLogger(__name__)


class CacheUnsafe(HoneError):
    """hone's folder in the cache may hold code that someone else put there; the text names it, and the cure."""

    kind = ErrorKind.INVALID_ARGUMENT

    def __init__(self, path: Path, found: str, cure: str) -> None:
        self.path = path
        super().__init__(
            f"kernels cache: {path}: {found}. Its libraries are run as code, so it must be this user's alone: {cure}"
        )


class CacheFolder:
    """Paths in `<root>/v<schema>/`, and the checks of that folder. It is made when something is first to be written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / f"v{SCHEMA}"
        self.staging = self.path / ".staging"
        self.locks = self.path / "locks"
        self.clock = self.path / "clock"
        self._told_open = False

    def check(self) -> bool:
        """Whether hone's folder exists. Raises CacheUnsafe when it does and cannot be trusted.

        One that others may merely read is closed to them, with a warning; so is told, once, a parent that others may
        write: there they can take the folder away, and not put another in its place unnoticed.
        """
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            raise CacheUnsafe(self.root, "is not a folder", "give another folder with --kernels-cache") from None
        if stat.S_ISLNK(status.st_mode):
            cure = f"rm {self.path}, and give its target's parent with --kernels-cache instead"
            raise CacheUnsafe(self.path, "is a symbolic link", cure)
        if not stat.S_ISDIR(status.st_mode):
            raise CacheUnsafe(self.path, "is not a folder", f"remove it: rm {self.path}")
        try:
            check_private(status, self.path)
        except NotPrivate as problem:
            if status.st_uid != os.geteuid():
                cure = f"run as user {status.st_uid}, give another folder with --kernels-cache, or rm -r {self.path}"
            else:
                cure = f"chmod 0700 {self.path} if you know who wrote to it, else rm -r {self.path}"
            raise CacheUnsafe(self.path, reason_of(problem), cure) from None
        if stat.S_IMODE(status.st_mode) & 0o077:
            self._close_to_others(stat.S_IMODE(status.st_mode))
        return True

    def create(self) -> None:
        """hone's folder, checked, and made if it is not there. Raises CacheUnsafe, or OSError if it cannot be made."""
        if self.check():
            return
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            self.path.mkdir(mode=FOLDER_MODE)
            sync_folder(self.root)
        except FileExistsError:  # by another server, just now
            pass
        self.check()

    def make(self, folder: Path) -> Path:
        """A folder inside hone's, with its parents. Raises OSError: NotPrivate where `check` says CacheUnsafe."""
        try:
            self.create()
        except CacheUnsafe as problem:
            raise NotPrivate(errno.EPERM, str(problem)) from problem
        make_folders(folder, self.path)
        return folder

    def place_of(self, name: EntryName) -> Path:
        return self.path / name.relative

    def warn_of_shared_parent(self) -> None:
        try:
            mode = stat.S_IMODE(self.root.stat().st_mode)
        except OSError:
            return
        if mode & 0o022 and not mode & stat.S_ISVTX:
            logger.warning(
                "kernels cache: %s can be written by others (mode %04o); they can remove what hone learned, though not"
                " change it",
                self.root,
                mode,
            )

    def _close_to_others(self, mode: int) -> None:
        if self._told_open:
            return
        self._told_open = True
        try:
            self.path.chmod(FOLDER_MODE)
        except OSError as problem:
            logger.warning(
                "kernels cache: %s can be read by others (mode %04o): %s", self.path, mode, reason_of(problem)
            )
        else:
            logger.warning("kernels cache: %s could be read by others (mode %04o), is 0700 now", self.path, mode)


class Listed(NamedTuple):
    """An entry as the folder tells of it, without opening any file."""

    name: EntryName
    path: Path
    size_bytes: int
    used_ns: int
    """Stamp of the last use; of entries without a manifest, 0."""


def names_in(folder: CacheFolder) -> Iterator[EntryName]:
    """Every entry's name, in no order; what has no name of an entry is passed over."""
    for kind, scope, parent in _parents(folder):
        for item in _scan(parent):
            if is_digest(item.name):
                yield EntryName(kind, scope, item.name)  # type: ignore[arg-type]


def listing(folder: CacheFolder) -> Iterator[Listed]:
    """Every entry with size and last use. Costs one look into each entry's folder and one at each of its files."""
    for name in names_in(folder):
        listed = look_at(name, folder.place_of(name))
        if listed is not None:
            yield listed


def look_at(name: EntryName, path: Path) -> Listed | None:
    """The entry's size and last use; None if it went meanwhile."""
    size, used_ns = 0, 0
    try:
        with os.scandir(path) as items:
            for item in items:
                status = item.stat(follow_symlinks=False)
                size += status.st_size
                if item.name == "manifest.json":
                    used_ns = status.st_mtime_ns
    except OSError:
        if not path.is_dir():
            return None
    return Listed(name, path, size, used_ns)


def devices_in(folder: CacheFolder) -> Iterator[str]:
    """Scopes of decisions and artifacts that have a folder."""
    for item in _scan(folder.path):
        if item.name not in RESERVED and not item.name.startswith(".") and item.is_dir(follow_symlinks=False):
            try:
                check_scope("decisions", item.name)
            except ValueError:
                continue
            yield item.name


def _parents(folder: CacheFolder) -> Iterator[tuple[str, str, Path]]:
    for item in _scan(folder.path / "kernels"):
        yield "kernels", item.name, folder.path / "kernels" / item.name
    for device in devices_in(folder):
        for kind in KINDS:
            if kind in ("decisions", "artifacts"):
                yield kind, device, folder.path / device / kind
    yield "constants", "", folder.path / "constants"


def _scan(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as items:
            return list(items)
    except (FileNotFoundError, NotADirectoryError):
        return []
