"""The kernel map of a model on a GPU: what the server answers there is told to the page here, where there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests import models
from tests.browser.support import findings, open_page
from tests.running import RunningServer, run_server

GROUP = {
    "what": "matmul 16x64 x 64x64 +relu", "note": "padded from matmul 16x63 x 63x64", "template": "cutlass.gemm2x",
    "parameters": {"slices": 2, "swizzle": 1}, "num_calls": 3, "microseconds": 20.0, "share": 0.4, "gflops": 1234.5,
    "of_roofline": 0.25,
}  # fmt: skip
MAP = {
    "artifact": "a" * 64, "device": "NVIDIA A100, sm_80", "gpu": True, "plain": False, "precision": "f16",
    "tuned_us": 50.0, "baseline_us": 100.0, "measured_us": 20.0, "rest_us": 30.0, "rest_share": 0.6,
    "groups": [GROUP],
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    models.write_model(repository, "one", models.identity("FP32"))
    with run_server(repository, "--tuning=cache", f"--kernels-cache={repository / '.cache'}") as running:
        yield running


def answer(page: Page, address: str, get: Any, post: Any = None) -> None:
    def fulfil(route: Route) -> None:
        told = post if route.request.method == "POST" else get
        route.fulfill(status=200, content_type="application/json", body=json.dumps(told))

    page.route(f"**/dashboard/{address}/one?batch=*", fulfil)


def test_a_gpus_map_is_there_at_once_and_profiling_tells_that_nothing_ran(page: Page, server: RunningServer) -> None:
    answer(page, "kernels", MAP)
    kept = {**MAP, "serves": True, "current": True, "note": ""}
    answer(page, "explain", None, {"signature": "x:FP32[16,64]", "gpus": [kept, {**kept, "serves": False}]})
    open_page(page, server, "#/models/one")
    section = page.locator("#section-kernels")
    expect(section).to_contain_text("f16 precision on NVIDIA A100, sm_80")
    expect(section).to_contain_text("Times are those of the search on that GPU")
    row = page.locator("table.kernels tbody tr")
    expect(row).to_contain_text("padded from matmul 16x63 x 63x64")
    expect(row).to_contain_text("slices=2 swizzle=1")
    assert findings(page) == []
    page.get_by_role("button", name="Profile kernels").click()
    expect(page.locator("table.kernels")).to_have_count(2)
    expect(section).to_contain_text("It is kept, and does not serve here.")
    assert findings(page) == []


def test_what_was_profiled_for_cpus_and_what_is_kept_for_gpus_are_shown_together(
    page: Page, server: RunningServer
) -> None:
    answer(page, "explain", {"unsupported": "no converter for Loop", "gpus": [{**MAP, "serves": False}]})
    open_page(page, server, "#/models/one")
    section = page.locator("#section-kernels")
    expect(section).to_contain_text("The compiler does not take it: no converter for Loop")
    expect(page.locator("table.kernels")).to_have_count(1)
