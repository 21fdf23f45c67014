from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hone.kernels import KernelsCache


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kernels_cache"


@pytest.fixture
def cache(root: Path) -> Iterator[KernelsCache]:
    opened = KernelsCache(root)
    yield opened
    opened.close()
