from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder
