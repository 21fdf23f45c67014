"""Threads belong to work, not to models."""

from __future__ import annotations

from pathlib import Path

from tests import models
from tests.process.support import EVERYTHING, answers
from tests.running import run_server

NUM_MODELS = 300


def test_many_models_have_the_threads_of_one(repository: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    models.write_model(few, "m0", models.scale(2.0))
    for number in range(NUM_MODELS):
        models.write_model(repository, f"m{number}", models.scale(2.0), config="instance_group [{ count: 4 }]")
    with run_server(few, *EVERYTHING) as one, run_server(repository, *EVERYTHING) as many:
        assert len(many.index()) == NUM_MODELS
        # The loaders start as they are needed, at most four of them; nothing else may differ.
        assert many.num_threads() - one.num_threads() <= 4 - 1
        idle = many.num_threads()
        for number in range(5):
            assert answers(many, f"m{number}", 2.0)
        assert many.num_threads() - idle <= 5, "a model called by one client at a time has one thread, not four"
