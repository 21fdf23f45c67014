from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.real_artifacts import Place, compile_softmax


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def compiled_softmax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a real artifact, compiled once for all tests (see `real_artifacts`)."""
    return compile_softmax(tmp_path_factory.mktemp("compiled") / "softmax")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A repository and a cache, both empty."""
    (tmp_path / "models").mkdir()
    return Place(tmp_path / "models", tmp_path / "cache")
