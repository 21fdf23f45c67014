"""System shared-memory regions that clients registered: off unless the server allows it.

Only POSIX shared memory by a plain name, opened without following links; every access is checked against the region's
bounds and against the object's size at that moment. A client that truncates its object in the instant between check
and use can still crash the server by SIGBUS, as with any server that maps foreign memory: one more reason for "off".
Messages never tell keys, so that no client learns another's.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from hone.errors import AlreadyExists, InvalidRequest, NotFound, Unsupported
from hone.types import RegionSlice, RegionStatus

_DIRECTORY = Path("/dev/shm")
_MAX_NAME = 255


@dataclass(frozen=True, slots=True)
class _Region:
    status: RegionStatus
    memory: mmap.mmap
    descriptor: int


class SharedMemoryRegions:
    """The registered regions by name. All methods are called on the event loop."""

    def __init__(self, *, allowed: bool, directory: Path = _DIRECTORY) -> None:
        self._allowed = allowed
        self._directory = directory
        self._regions: dict[str, _Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map `byte_size` bytes from `offset` of the object `key`.

        Raises Unsupported (not allowed here), AlreadyExists, InvalidRequest (bad key or range).
        """
        self._check_allowed()
        if not name:
            raise InvalidRequest("shared memory region name cannot be empty")
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        if offset < 0 or byte_size <= 0:
            raise InvalidRequest(
                f"Invalid offset or byte_size for shared memory region '{name}': expected offset >= 0 and byte_size > 0"
            )
        plain = key.removeprefix("/")
        if not plain or "/" in plain or "\0" in plain or plain in (".", "..") or len(os.fsencode(plain)) > _MAX_NAME:
            raise InvalidRequest(f"Invalid key for shared memory region '{name}': expected a name of one component")
        try:
            descriptor = os.open(self._directory / plain, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as problem:
            raise InvalidRequest(f"Unable to open shared memory region: '{name}'") from problem
        try:
            size = os.fstat(descriptor).st_size
            if offset + byte_size > size:
                raise InvalidRequest(
                    f"Invalid offset or byte_size for shared memory region '{name}':"
                    f" it has {size} bytes, needs {offset + byte_size}"
                )
            memory = mmap.mmap(descriptor, offset + byte_size)
        except (OSError, ValueError) as problem:
            os.close(descriptor)
            raise InvalidRequest(f"Unable to map shared memory region: '{name}'") from problem
        except InvalidRequest:
            os.close(descriptor)
            raise
        self._regions[name] = _Region(RegionStatus(name, key, offset, byte_size), memory, descriptor)

    def unregister(self, name: str) -> None:
        """Forget one region, or all with an empty name; unknown names are no error, as in Triton."""
        self._check_allowed()
        for gone in [name] if name else list(self._regions):
            region = self._regions.pop(gone, None)
            if region is not None:
                _release(region)

    def statuses(self, name: str = "") -> list[RegionStatus]:
        self._check_allowed()
        if not name:
            return [region.status for region in self._regions.values()]
        return [self._region(name).status]

    def view(self, place: RegionSlice) -> memoryview:
        """See `types.SharedMemoryAccess`."""
        self._check_allowed()
        region = self._region(place.region)
        if place.offset < 0 or place.byte_size < 0 or place.offset + place.byte_size > region.status.byte_size:
            raise InvalidRequest(f"Invalid offset + byte size for shared memory region: '{place.region}'")
        start = region.status.offset + place.offset
        stop = start + place.byte_size
        if os.fstat(region.descriptor).st_size < stop:
            raise InvalidRequest(f"Shared memory region '{place.region}' has become smaller than it was registered")
        return memoryview(region.memory)[start:stop]

    def close(self) -> None:
        for region in self._regions.values():
            _release(region)
        self._regions.clear()

    def _region(self, name: str) -> _Region:
        region = self._regions.get(name)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        return region

    def _check_allowed(self) -> None:
        if not self._allowed:
            raise Unsupported("shared memory is not allowed on this server: start it with --allow-client-shm=true")


def _release(region: _Region) -> None:
    os.close(region.descriptor)
    try:
        region.memory.close()
    except BufferError:
        return  # a request still holds a view; the last view to go unmaps the memory
