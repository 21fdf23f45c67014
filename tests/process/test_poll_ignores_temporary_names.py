"""Hidden and temporary names are no models, and no parts of one."""

from __future__ import annotations

from pathlib import Path

from tests import models
from tests.process.support import POLL, answers, first_value, is_serving, let_polls_pass, num_loads
from tests.running import run_server, wait_until

IGNORED = (".hidden", ".aitune-m-x1", "m.tmp", "m~", "m.part", ".m.swp", "m.swp", ".#m", "lost+found")


def test_folders_with_such_names_are_passed_over_until_renamed(repository: Path) -> None:
    for name in IGNORED:
        models.write_model(repository, name, models.scale(2.0))
    (repository / "README.md").write_text("not a model", encoding="utf-8")
    with run_server(repository, *POLL) as server:
        let_polls_pass(server, repository)
        assert {name for name, _ in server.index()} == {"marker"}
        assert first_value(server, "m.tmp") is None
        (repository / "m.tmp").rename(repository / "m")
        wait_until(lambda: answers(server, "m", 2.0), "the renamed model is taken")
        assert {name for name, _ in server.index()} == {"marker", "m"}


def test_files_with_such_names_change_nothing(repository: Path) -> None:
    folder = models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *POLL) as server:
        for path in (
            "1/model.onnx.part",
            "1/.model.onnx.swp",
            ".config.pbtxt.swp",
            "1/model.onnx~",
            "2.tmp/model.onnx",
        ):
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(b"half a file")
        let_polls_pass(server, repository)
        assert num_loads(server, "m") == 1
        assert is_serving(server, "m")
        (folder / "2.tmp" / "model.onnx").write_bytes(models.scale(7.0))
        (folder / "2.tmp").rename(folder / "2")
        wait_until(lambda: answers(server, "m", 7.0), "the renamed version is taken")
