"""Reading tar files that strangers made: one header at a time, bounded, and nothing but plain files and folders.

The library's reader follows extension headers by itself (long names, sparse files, global attributes) and reads them
into memory; here they are refused, so that a member is what its header says, and no larger than the file it is in.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

BLOCK = tarfile.BLOCKSIZE

_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


class BadTar(Exception):
    """The text says what is wrong, and with which member."""


class Member(NamedTuple):
    name: str
    offset: int
    """Of its content in the file."""
    size: int


def members(file: BinaryIO, max_members: int) -> Iterator[Member]:
    """The plain files in a tar file. Raises BadTar, OSError."""
    end = os.fstat(file.fileno()).st_size
    position = count = 0
    while True:
        file.seek(position)
        block = file.read(BLOCK)
        if not block or (block.count(0) == len(block) == BLOCK):
            if not block and position == 0:
                raise BadTar("it is empty")
            if not block:
                raise BadTar(f"it ends at {position} bytes without the mark of a tar file's end: it was cut off")
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as problem:
            what = "it is not an uncompressed tar file" if position == 0 else f"header at {position} bytes is damaged"
            raise BadTar(f"{what}: {problem}") from None
        position += BLOCK
        count += 1
        if count > max_members:
            raise BadTar(f"it has more than {max_members} members")
        if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
            kind = _KINDS.get(header.type, f"of type {header.type!r}")
            raise BadTar(f"member '{header.name}' is {kind}, expected plain files and folders only")
        if header.size < 0 or header.size > end - position:
            raise BadTar(f"member '{header.name}' claims {header.size} bytes, {end - position} are left: cut off")
        if header.type == tarfile.DIRTYPE or header.name.endswith("/"):
            if header.size:
                raise BadTar(f"member '{header.name}' is a folder with content")
            continue
        yield Member(header.name, position, header.size)
        position += -(-header.size // BLOCK) * BLOCK
