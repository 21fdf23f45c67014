"""A repository on disk that tests write models into."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.repository import ModelRepository
from hone.repository.fingerprint import Fingerprints, hash_file

FAR_FUTURE_NS = 2**62


class RepositoryOnDisk:
    """One root folder, and a ModelRepository over it that counts how often a file is read to be hashed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        self.num_hashed = 0
        # Times of files just written are long settled for this clock, so digests are kept from the first time on.
        self.fingerprints = Fingerprints(hash_file=self._hash, now_ns=lambda: FAR_FUTURE_NS)
        self.repository = ModelRepository([root], allow_file_override=True, fingerprints=self.fingerprints)

    def _hash(self, path: Path) -> str:
        self.num_hashed += 1
        return hash_file(path)

    def write(self, path: str, content: str | bytes = b"graph") -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
        return target

    def model(self, name: str = "m", config: str | None = None, *versions: int, content: bytes = b"graph") -> Path:
        for version in versions or (1,):
            self.write(f"{name}/{version}/model.onnx", content)
        if config is not None:
            self.write(f"{name}/config.pbtxt", config)
        return self.root / name


@pytest.fixture
def disk(tmp_path: Path) -> RepositoryOnDisk:
    return RepositoryOnDisk(tmp_path / "models")
