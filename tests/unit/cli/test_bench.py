"""`hone bench`: what it asks of a server, what it leaves behind, and what it tells."""

from __future__ import annotations

import csv
import io
import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hone.cli.load import Load, Measured
from hone.cli.main import main

QUICK = ("--duration", "0.05")
TEXTS = (b"a", b"", "ö".encode(), b"bcd")


def run(model_server: Any, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = main(["bench", "m", "--url", model_server.url, *QUICK, *flags])
    return code, *capsys.readouterr()


def test_both_engines_in_turn_and_no_action(model_server, capsys) -> None:
    code, out, _ = run(model_server, capsys, "--json")
    assert code == 0
    assert model_server.calls == ["", "tuned", "baseline", "tuned"], "two probes, tuned, baseline twice, tuned"
    told = json.loads(out)
    assert told["engines"] == ["baseline", "tuned"]
    assert told["note"] == ""
    assert [line["engine"] for line in told["results"]] == ["baseline", "tuned"]
    for line in told["results"]:
        assert line["num_requests"] > 0
        assert line["num_errors"] == 0
        assert line["p50_us"] <= line["p99_us"] <= line["max_us"]


def test_the_engine_of_now_asks_for_none(model_server, capsys) -> None:
    code, out, _ = run(model_server, capsys, "--engine=current", "--json")
    assert code == 0
    assert model_server.calls == [""]
    assert json.loads(out)["engines"] == ["current"]


@pytest.mark.parametrize(
    ("choice", "flags", "note"),
    [
        ("offered", ("--batch=2",), "IN:FP32[2,4] does not run tuned (its tuning is tuned)"),
        ("ignored", (), "this server is older, and lets no request choose its engine"),
        ("locked", (), "the engine can be chosen with the key of 'tuning' only"),
    ],
)
def test_what_cannot_be_compared_is_measured_as_it_serves(model_server, capsys, choice, flags, note) -> None:
    model_server.choice = choice
    code, out, _ = run(model_server, capsys, *flags)
    assert code == 0
    assert f"measured as it serves now: {note}" in out
    assert model_server.calls == ["", "tuned", ""]


def test_side_by_side(model_server, capsys) -> None:
    code, out, _ = run(model_server, capsys, "--clients=1,2", "--rate=200")
    assert code == 0
    assert out.splitlines()[0] == f"m at {model_server.url}, IN:FP32[1,4]"
    for head in ("closed loop, 1 client", "closed loop, 2 clients", "open loop, 200 requests/s"):
        assert head in out.splitlines()
    assert sum("tuned is" in line for line in out.splitlines()) == 3
    assert "\x1b" not in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_csv_to_a_file_and_to_standard_output(model_server, capsys, tmp_path: Path) -> None:
    code, out, _ = run(model_server, capsys, "--clients=1,2", "--csv", str(tmp_path / "b.csv"))
    assert code == 0
    assert "closed loop" in out
    lines = list(csv.DictReader(io.StringIO((tmp_path / "b.csv").read_text())))
    assert [(line["clients"], line["engine"]) for line in lines] == [
        ("1", "baseline"), ("1", "tuned"), ("2", "baseline"), ("2", "tuned"),
    ]  # fmt: skip
    assert all(float(line["p99_us"]) > 0 for line in lines)
    code, out, _ = run(model_server, capsys, "--csv", "-")
    assert len(list(csv.DictReader(io.StringIO(out)))) == 2


def test_inputs_come_from_files(model_server, capsys, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1, 2, 3, 4]")
    code, _, _ = run(model_server, capsys, "--engine=current", f"--input=IN={tmp_path / 'x.json'}", "--batch=2")
    assert code == 0
    row = struct.pack("<4f", 1, 2, 3, 4)
    assert all(body.endswith(row + row) for body in model_server.requests)


@pytest.mark.parametrize(
    ("datatype", "text", "row"),
    [
        ("FP16", "[1, 2, 0.1, 4]", np.array([1, 2, 0.1, 4], np.float16).tobytes()),
        ("BF16", "[1, 2, 0.1, 4]", np.array([1, 2, 0.1, 4], ml_dtypes.bfloat16).tobytes()),
        ("BYTES", '["a", "", "\u00f6", "bcd"]', b"".join(struct.pack("<I", len(t)) + t for t in TEXTS)),
    ],
)
def test_files_of_what_json_cannot_carry_are_sent_as_bytes(model_server, capsys, tmp_path, datatype, text, row) -> None:
    model_server.datatype = datatype
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    code, _, err = run(model_server, capsys, "--engine=current", f"--input=IN={tmp_path / 'x.json'}", "--batch=2")
    assert code == 0, err
    assert all(body.endswith(row + row) for body in model_server.requests)


def test_numbers_are_no_texts(model_server, capsys, tmp_path) -> None:
    model_server.datatype = "BYTES"
    (tmp_path / "x.json").write_text("[1, 2, 3, 4]")
    code, _, err = run(model_server, capsys, f"--input=IN={tmp_path / 'x.json'}")
    assert code != 0
    assert "cannot be read as BYTES array: it holds int64, not texts" in err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--duration=0",), "--duration: expected 0.05 to 3600, found 0"),
        (("--rounds=0",), "--rounds: expected 1"),
        (("--clients=0",), "--clients: expected 1 to 256, found 0"),
        (("--rate=0",), "--rate: expected"),
        (("--batch=0",), "--batch: expected 1"),
        (("--input=X=f",), "the model has no input 'X', it has IN"),
        (("--input=IN",), "expected INPUT=FILE"),
        (("--shape=IN:5",), "expected sizes (without the batch) that fit [4], found [5]"),
        (("--shape=IN:axb",), "expected sizes such as 3x224x224, found 'axb'"),
        (("--model-version=7",), "404"),
    ],
)
def test_flags_that_make_no_sense(model_server, capsys, flags: tuple[str, ...], expected: str) -> None:
    code = main(["bench", "m", "--url", model_server.url, *flags])
    told = capsys.readouterr()
    assert (code, told.out) == (1, "")
    assert expected in told.err


def test_a_refusal_at_the_start_ends_it(model_server, capsys) -> None:
    model_server.refuse = -1
    code, out, err = run(model_server, capsys)
    assert (code, out) == (1, "")
    assert '400: {"error": "no"}' in err
    assert len(model_server.requests) == 1


def test_a_tuned_engine_that_goes_meanwhile_is_an_error(model_server, capsys) -> None:
    answer = model_server._infer

    def going(engine: str, rows: int) -> tuple[int, Any]:
        if engine == "baseline":
            model_server.is_tuned = False
        return answer(engine, rows)

    model_server._infer = going
    code, out, err = run(model_server, capsys, "--json")
    assert code == 1
    errors = {line["engine"]: line["num_errors"] for line in json.loads(out)["results"]}
    assert errors["baseline"] == 0
    assert errors["tuned"] > 0
    assert "hone bench: tuned, 1 client: " in err


def test_errors_on_the_way_are_counted(model_server, capsys) -> None:
    model_server.refuse = 3
    code, out, err = run(model_server, capsys, "--engine=current", "--json")
    assert code == 1
    [line] = json.loads(out)["results"]
    assert line["num_errors"] > 0
    assert "error(s), the first: 400" in err


def test_quantiles_are_latencies_that_occurred() -> None:
    measured = Measured([float(value) for value in range(100, 0, -1)], seconds=2.0)
    told = measured.summary()
    assert (told["p50_us"], told["p99_us"], told["p99.9_us"], told["max_us"]) == (50.0, 99.0, 100.0, 100.0)
    assert told["requests_per_second"] == 50.0
    assert Measured().summary()["p50_us"] is None


def test_loads_have_names() -> None:
    assert [load.text for load in (Load(1), Load(4), Load(64, 12.5))] == ["1 client", "4 clients", "12.5 requests/s"]
