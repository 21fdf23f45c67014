import os
import stat

import pytest

from benchmarks.bench import bare_server
from benchmarks.perf_analyzer import PerfAnalyzer, count_requests, read_report
from benchmarks.processes import BenchmarkError

HEADER = "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency"  # noqa: E501
ROW = "4,24681.3,14,145,0,0,0,0,0,132,256,279,374"


@pytest.fixture
def fake_binary(tmp_path):
    """Makes a stand-in for the binary out of the body of a shell script."""

    def make(body):
        path = tmp_path / "perf_analyzer"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return PerfAnalyzer(path, [tmp_path / "libraries"])

    return make


def test_report_is_read_by_column_name():
    result = read_report(f"{HEADER}\n{ROW}\n")
    assert (result.throughput, result.p50_us, result.p90_us, result.p99_us) == (24681.3, 132, 256, 374)
    assert result.cpu_us is None


@pytest.mark.parametrize("text", ["", HEADER, f"{HEADER}\n{ROW}\n{ROW}", "Concurrency\n4", f"{HEADER}\n4,many"])
def test_what_is_not_a_report_is_refused(text):
    with pytest.raises(BenchmarkError):
        read_report(text)


def test_missing_libb64_names_the_debian_package(fake_binary):
    tool = fake_binary(
        "echo 'perf_analyzer: error while loading shared libraries: libb64.so.0d: cannot open shared object file' >&2\n"
        "exit 127"
    )
    with pytest.raises(BenchmarkError, match=r"libb64-0d.*make test-deps"):
        tool.check()


def test_missing_binary_says_what_to_run(tmp_path):
    with pytest.raises(BenchmarkError, match="make perf-tools"):
        PerfAnalyzer(tmp_path / "absent", []).check()


def test_library_folder_comes_first(fake_binary, tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", os.fspath(tmp_path))
    tool = fake_binary(f'[ "$LD_LIBRARY_PATH" = "{tmp_path}/libraries:{tmp_path}" ]')
    tool.check()


def test_run_passes_what_was_asked_and_reads_the_report(fake_binary, tmp_path):
    tool = fake_binary(
        f'echo "$@" > {tmp_path}/arguments\nwhile [ "$1" != -f ]; do shift; done\nprintf \'{HEADER}\\n{ROW}\\n\' > "$2"'
    )
    result = tool.run("127.0.0.1:9", "grpc", "net", 4, {"x": (3, 48, 192)}, window_seconds=0.5)
    arguments = (tmp_path / "arguments").read_text()
    for expected in (
        "-m net",
        "-u 127.0.0.1:9",
        "-i grpc",
        "--concurrency-range 4",
        "--measurement-interval 500",
        "--shape x:3,48,192",
    ):
        assert expected in arguments
    assert result.throughput == 24681.3


@pytest.mark.parametrize("body", ["echo 'no such model' >&2; exit 99", "true"])
def test_failed_run_is_an_error_with_its_output(fake_binary, body):
    with pytest.raises(BenchmarkError, match="exit code"):
        fake_binary(body).run("127.0.0.1:9", "http", "net", 1, {})


@pytest.mark.parametrize(("module", "protocol"), [("http_asgi", "http"), ("grpc_aio", "grpc")])
def test_requests_are_counted_by_the_servers_statistics(module, protocol):
    with bare_server(module, protocol) as target:
        assert count_requests(target.url(protocol), protocol, "identity") == 0
