"""What `hone tune` prints."""

from __future__ import annotations

import io
import json

import pytest

from hone.cli.main import main
from hone.cli.tune import print_outcome


def bucket(signature, outcome="passed", reason="", *, provisional=False, pinned=False):
    times = {"baseline_ms": 1234.5, "tuned_ms": 0.01234, "speedup": 1.613, "max_error": 1.234e-6}
    return {
        "signature": signature,
        "engine": "tvm" if outcome == "passed" and not pinned else "onnxruntime",
        "generation": int(outcome == "passed" and not pinned),
        **times,
        "provisional": provisional,
        "outcome": outcome,
        "reason": reason,
    }


@pytest.fixture
def printed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")

    def show(*buckets, state="tuned", reason=""):
        out = io.StringIO()
        status = {"model": "m[b]", "version": "1", "state": state, "reason": reason, "buckets": list(buckets)}
        print_outcome([json.loads(json.dumps(status))], out)
        return out.getvalue()

    return show


def test_eighty_columns_are_enough(printed):
    bert = "input_ids:INT64[1,128] attention_mask:INT64[1,128] token_type_ids:INT64[1,128]"
    text = printed(bucket("image:FP32[1,3,224,224]"), bucket(bert))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.startswith("m[b] version 1 is tuned\n")
    [line] = [line for line in text.splitlines() if line.startswith("image:")]
    assert line.split() == ["image:FP32[1,3,224,224]", "tvm", "1234", "ms", "0.01234", "ms", "1.613x", "1.234e-06"]
    assert text.count("1.234e-06") == 2, "numbers are never cut"


def test_what_passed_and_is_pinned_runs_on_its_baseline(printed):
    lines = printed(bucket("A:FP32[1]", pinned=True), bucket("B:FP32[1]"), state="baseline").splitlines()
    assert [line.split()[1] for line in lines[2:4]] == ["onnxruntime", "tvm"]


def test_a_reason_is_told_once_with_all_that_it_is_true_of(printed):
    reason = "not faster by 3%: baseline 19 ms, tuned 19 ms"
    text = printed(
        bucket("x:FP32[1]", "refused", reason),
        bucket("x:FP32[2]", "refused", reason),
        bucket("x:FP32[4]", "refused", "noise", provisional=True),
        bucket("x:FP32[8]", "failed"),
    )
    words = " ".join(text.split())
    assert f"x:FP32[1], x:FP32[2]: {reason}" in words
    assert "x:FP32[4]: noise (asked again when serving rests)" in words
    assert "x:FP32[8]: failed" in words


def test_without_signatures_the_models_own_reason_is_told(printed):
    assert printed(state="off", reason="signatures: unknown input") == (
        "m[b] version 1 is off\n  signatures: unknown input\n"
    )


@pytest.mark.parametrize(
    "given, told", [("-3", "greater than or equal to 0, got -3.0"), ("nan", "a finite number, got nan")]
)
def test_a_budget_that_is_none_is_told(given, told, capsys, tmp_path):
    assert main(["tune", "digits", "--model-repository", str(tmp_path), f"--budget-secs={given}"]) != 0
    error = capsys.readouterr().err
    assert f"--budget-secs: Input should be {told}" in error


def test_reasons_of_several_lines_break_no_table(printed):
    text = printed(bucket("x:FP32[1]", "failed", "it does not load:\n\n  no symbol"))
    assert "  x:FP32[1]: it does not load: no symbol\n" in text
    assert printed(state="off", reason="no\nsuch") == "m[b] version 1 is off\n  no such\n"
