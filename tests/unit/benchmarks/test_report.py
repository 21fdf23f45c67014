import json

import pytest

from benchmarks import identity, real_models, scale
from benchmarks.bench import Bench
from benchmarks.models import RealModel
from benchmarks.perf_analyzer import PerfAnalyzer, Result
from benchmarks.profile_serving import summarize
from benchmarks.report import Row, at_least, at_most, format_table, write_json


class Samples(dict):
    """Every measurement that is asked for, equal unless set otherwise."""

    def __missing__(self, name):
        return [Result(1000.0, 100.0, 200.0, 300.0, 50.0)]

    def __contains__(self, name):
        return True


@pytest.fixture
def bench(tmp_path):
    return Bench(PerfAnalyzer(tmp_path, []), samples=Samples())


def row_of(rows, figure):
    (row,) = [row for row in rows if row.figure == figure]
    return row


@pytest.mark.parametrize(("measured", "met"), [(949.0, False), (950.0, True), (1100.0, True)])
def test_at_least_compares_with_a_share_of_the_reference(measured, met):
    row = at_least("x", "/s", measured, 1000.0, "direct", 0.95)
    assert row.met is met
    assert row.ratio == measured / 1000


def test_without_a_bar_there_is_no_verdict():
    assert at_least("x", "/s", 1.0, 2.0, "y", None).met is None


@pytest.mark.parametrize(("measured", "met"), [(1.5, True), (2.0, True), (2.01, False)])
def test_at_most(measured, met):
    assert at_most("x", "s", measured, 2.0, "limit").met is met


def test_medians_are_of_the_rounds(bench):
    bench.samples["x"] = [Result(value, value, value, value, value) for value in (3.0, 90.0, 1.0)]
    assert (bench.throughput("x"), bench.p50_us("x"), bench.cpu_us("x")) == (3.0, 3.0, 3.0)


def test_rounds_interleave_the_measurements(bench):
    bench.samples = {}
    order = []

    def measurement(name):
        def measure():
            order.append(name)
            return Result(1.0, 1.0, 1.0, 1.0)

        return name, measure

    bench.run_rounds([measurement("a"), measurement("b")])
    assert order == ["a", "b"] * 3
    assert len(bench.samples["a"]) == 3


@pytest.mark.parametrize(("throughput", "met"), [(499.0, False), (500.0, True)])
def test_small_requests_over_http_get_half_of_the_floor(bench, throughput, met):
    bench.samples["identity hone http 64 B"] = [Result(throughput, 1.0, 1.0, 1.0, 1.0)]
    (row,) = [row for row in identity.rows(bench) if row.figure == "http 64 B" and "bare" in row.reference]
    assert row.met is met


@pytest.mark.parametrize(("p50", "met"), [(349.0, True), (351.0, False)])
def test_one_client_of_a_real_model_may_wait_150_us_more(bench, tmp_path, p50, met):
    bench.samples["net http hone one client"] = [Result(1.0, p50, 1.0, 1.0, 1.0)]
    rows = real_models.rows(bench, RealModel("net", tmp_path, "x", (3, 2)))
    assert row_of(rows, "net http, one client, p50").met is met


def test_cost_that_grows_is_missed(bench):
    bench.samples["scale http models"] = [Result(1.0, 1.0, 1.0, 1.0, 60.0)]
    assert [row.met for row in scale.rows(bench) if "models" in row.figure and "CPU" in row.figure] == [False, True]


def test_table_holds_every_row_and_marks_the_missed():
    table = format_table({"first": [Row("a", "1", "2", 0.5, ">= 1 x", False)], "second": [Row("b", "3", "")]})
    lines = table.splitlines()
    assert lines[0].split() == ["figure", "measured", "against", "ratio", "bar", "met"]
    assert next(line for line in lines if line.startswith("a ")).endswith("NO")
    assert "first" in lines
    assert "second" in lines


def test_json_holds_table_and_samples(tmp_path):
    path = tmp_path / "results" / "serving.json"
    write_json(path, {"cpu": "any"}, {"first": [Row("a", "1", "2")]}, {"x": [1.0]})
    content = json.loads(path.read_text())
    assert content["cpu"] == "any"
    assert content["table"]["first"][0]["figure"] == "a"
    assert content["samples"] == {"x": [1.0]}


def test_profile_counts_frames_alone_and_together():
    total, alone, together = summarize(["main;loop;send 3", "main;loop 2", "main;loop;loop;parse 1", ""])
    assert total == 6
    assert alone == {"send": 3, "loop": 2, "parse": 1}
    assert together["loop"] == 6
