"""What `hone config check` finds, and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone.cli.lint import Finding, lint, models_of
from hone.cli.main import main
from tests import models

GOOD = """\
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""


def write(folder: Path, config: str | None, name: str = "m") -> Path:
    models.write_model(folder, name, models.identity(), config=config)
    return folder / name


def found(folder: Path, config: str, *, graph: bool = True) -> list[tuple[int, str, str]]:
    return [(one.line, one.field, one.message) for one in lint(write(folder, config), graph=graph)]


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


@pytest.mark.parametrize("config", [GOOD, "", None])
def test_a_good_model_has_no_findings(tmp_path: Path, config: str | None) -> None:
    assert lint(write(tmp_path, config)) == []


def test_every_unknown_field_is_told_with_what_was_meant(tmp_path: Path) -> None:
    config = """\
max_batch_sizes: 8
input [
  { name: "IN" data_type: FP32 dims: [ 4 ] }
]
instance_group [ { kind: KIND_CPUS counts: 1 } ]
"""
    told = found(tmp_path, config)
    assert [(line, field) for line, field, _ in told] == [
        (1, "max_batch_sizes"),
        (3, "input[0].data_type"),
        (5, "instance_group[0].kind"),
        (5, "instance_group[0].counts"),
    ]
    for (_, _, message), meant in zip(told, ("max_batch_size", "TYPE_FP32", "KIND_CPU", "count"), strict=True):
        assert message.endswith(f"did you mean '{meant}'?")


def test_values_are_told_where_they_stand(tmp_path: Path) -> None:
    config = GOOD.replace("dims: [ 4 ] } ]\noutput", "dims: [ 0 ] } ]\noutput") + (
        "dynamic_batching { preferred_batch_size: [ 4, 16 ] }\n"
        "optimization { execution_accelerators { cpu_execution_accelerator [ {\n"
        '  name: "tvm"\n'
        '  parameters { key: "precison" value: "f32" }\n'
        "} ] } }\n"
    )
    told = found(tmp_path, config)
    assert [line for line, _, _ in told] == [2, 4, 7]
    assert told[0][1] == "input[0].dims[0]"
    assert "expected at most max_batch_size, which is 8, found 16" in told[1][2]
    assert told[2][2].endswith("did you mean 'precision'?")


def test_a_wrong_type_and_a_broken_structure(tmp_path: Path) -> None:
    assert found(tmp_path, '\nmax_batch_size: "a"\n') == [(2, "", 'Couldn\'t parse integer: "a"')]
    line, _, message = found(tmp_path, "input {\n name: 'x'\n")[0]
    assert line == 2
    assert "end of the file" in message


def test_the_graph_is_compared(tmp_path: Path) -> None:
    config = GOOD.replace('"IN"', '"INPUT"')
    line, field, message = found(tmp_path, config)[0]
    assert (line, field) == (2, "input[0].name")
    assert "allowed inputs are: IN" in message
    assert found(tmp_path, config, graph=False) == []


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    models.write_model(tmp_path, "m", b"nonsense")
    finding = only(lint(tmp_path / "m"))
    assert finding.severity == "error"
    assert "ONNX Runtime does not take it" in finding.message


def test_versions_and_files_by_other_names(tmp_path: Path) -> None:
    folder = write(tmp_path, None)
    (folder / "1").rename(folder / "v01")
    (folder / "config.pbtx").write_text("")
    (folder / "net.onnx").write_bytes(b"")
    told = {Path(one.file).name: one for one in lint(folder)}
    assert told["v01"].severity == "warning"
    assert "rename it to '1'" in told["v01"].message
    assert "did you mean 'config.pbtxt'?" in told["config.pbtx"].message
    assert "move it to '1/model.onnx'" in told["net.onnx"].message
    assert told["m"].severity == "error"


def test_a_path_may_be_a_repository_a_model_or_a_file(tmp_path: Path) -> None:
    folder = write(tmp_path, GOOD)
    write(tmp_path, None, "other")
    assert models_of(tmp_path) == [folder, tmp_path / "other"]
    assert models_of(folder) == models_of(folder / "config.pbtxt") == [folder]
    assert models_of(tmp_path / "other") == [tmp_path / "other"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "models", GOOD)
    assert main(["config", "check", "models"]) == 0
    assert capsys.readouterr().out == "1 model(s): 0 error(s), 0 warning(s)\n"
    write(tmp_path / "models", "max_batch_sizes: 1\n")
    assert main(["config", "check", "models", "--no-graph"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first == ("models/m/config.pbtxt:1:1: error: max_batch_sizes: unknown field; did you mean 'max_batch_size'?")
    assert main(["config", "check", "models", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["num_models"], told["num_errors"], told["findings"][0]["line"]) == (1, 1, 1)


ON_GPUS = GOOD + "instance_group [ { kind: KIND_GPU gpus: [ 0, 1 ] } ]\n"


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_a_model_for_gpus_is_right_where_there_are_enough(tmp_path: Path, num_gpus: int) -> None:
    assert lint(write(tmp_path, ON_GPUS), num_gpus=num_gpus) == []


def test_a_model_for_more_gpus_than_there_are(tmp_path: Path) -> None:
    finding = only(lint(write(tmp_path, ON_GPUS), num_gpus=1, machine="the box"))
    assert (finding.line, finding.field) == (4, "instance_group[0].gpus")
    assert finding.message == "expected numbers of 0 to 0, found [0, 1]: the box has 1 NVIDIA GPU"


def test_the_command_judges_by_this_machine_or_by_the_one_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(write(tmp_path, ON_GPUS))
    monkeypatch.setattr("hone.tuning.gpus.detect_gpus", lambda: (object(),) * 2)
    assert main(["config", "check", folder]) == 0
    assert main(["config", "check", folder, "--gpus", "1"]) == 1
    told = capsys.readouterr().out
    assert "found [0, 1]: the machine that this is checked for (--gpus 1) has 1 NVIDIA GPU" in told
    monkeypatch.setattr("hone.tuning.gpus.detect_gpus", lambda: ())
    assert main(["config", "check", folder, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["num_gpus"] == 0
    assert (
        "found KIND_GPU: this machine (--gpus N checks for another) runs models on the CPU"
        in (found["findings"][0]["message"])
    )
    with pytest.raises(SystemExit):
        main(["config", "check", folder, "--gpus", "-1"])


def test_strict_counts_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, None)
    (folder / "config.pbtx").write_text("")
    assert main(["config", "check", str(folder)]) == 0
    assert main(["config", "check", str(folder), "--strict"]) == 1
    assert "1 warning(s)" in capsys.readouterr().out


@pytest.mark.parametrize("empty", [True, False])
def test_a_path_without_models(tmp_path: Path, capsys: pytest.CaptureFixture[str], empty: bool) -> None:
    path = tmp_path if empty else tmp_path / "absent"
    assert main(["config", "check", str(path)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert str(path) in told.err
    assert "expected" in told.err
