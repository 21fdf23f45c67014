"""A model is dropped while the page is open: it appears, gets tuned and swapped in, and obeys; without a reload."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from playwright.sync_api import Page, expect

from tests import models
from tests.browser.support import act, findings, open_page, shoot
from tests.running import RunningServer, run_server, wait_until

DIMS = (1, 3, 32, 48)
TUNING_MS = 200_000


def chain() -> bytes:
    """Sixteen element-wise operators, which one fused pass does in a fraction of ONNX Runtime's time."""
    nodes, value = [], "IN"
    for number in range(16):
        out = "OUT" if number == 15 else f"v{number}"
        operator = ("Mul", "Add", "Relu", "Sub", "Abs")[number % 5]
        nodes.append(helper.make_node(operator, [value] if operator in ("Relu", "Abs") else [value, "c"], [out]))
        value = out
    constant = helper.make_tensor("c", TensorProto.FLOAT, [], [1.25])
    return models.model(nodes, {"IN": ("FP32", DIMS)}, {"OUT": ("FP32", DIMS)}, [constant])


@contextlib.contextmanager
def requests(server: RunningServer) -> Iterator[None]:
    """Keeps asking the model, a little at a time, so that tuning has room."""
    image = np.random.default_rng(7).standard_normal(DIMS).astype(np.float32)
    tensor = {"name": "IN", "datatype": "FP32", "shape": list(DIMS), "data": image.reshape(-1).tolist()}
    done = threading.Event()
    statuses: set[int] = set()

    def ask() -> None:
        while not done.wait(0.05):
            statuses.add(server.post("/v2/models/chain/infer", {"inputs": [tensor]})[0])

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert statuses == {200}


@pytest.mark.timeout(400)
def test_a_dropped_model_is_tuned_and_swapped_before_ones_eyes(page: Page, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    flags = ("--model-control-mode=poll", "--repository-poll-secs=0.2", "--tuning=on")
    with run_server(repository, *flags, f"--kernels-cache={tmp_path / 'cache'}") as server:
        open_page(page, server)
        expect(page.get_by_text("No models yet.")).to_be_visible()
        shoot(page, "empty")
        page.evaluate("window.sameDocument = true")

        models.write_model(repository, "chain", chain())
        row = page.locator("tbody tr", has_text="chain")
        expect(row.locator(".badge.READY")).to_be_visible()
        with requests(server):
            row.get_by_role("link", name="chain").click()
            expect(page.get_by_role("heading", level=1)).to_have_text("chain")
            expect(page.locator(".badges .badge", has_text="tuning")).to_be_visible()
            expect(page.locator("#section-tuning progress")).to_be_visible()
            shoot(page, "tuning")
            expect(page.locator(".marker.promoted").first).to_be_attached(timeout=TUNING_MS)
            expect(page.locator(".badges .badge.tuned").first).to_be_visible()
            expect(page.locator(".legend", has_text="tuned p50")).to_be_visible()
        bucket = page.locator("#section-buckets tbody tr")
        expect(bucket).to_contain_text("tuned, generation 1")
        told = server.get("/v2/models/chain/tuning")[1]["buckets"][0]
        expect(bucket).to_contain_text(f"{told['speedup']:.2f}×")
        expect(page.locator("#section-history")).to_contain_text("promoted")
        expect(page.locator(".badges .badge.tuning")).to_have_count(0, timeout=TUNING_MS)
        assert page.evaluate("window.sameDocument") is True, "the page was loaded anew"

        expect(page.locator("#section-kernels")).to_contain_text("What tuning knows")
        expect(page.locator("table.kernels")).to_contain_text("element-wise")
        page.get_by_role("button", name="Profile kernels").click()
        expect(page.locator("table.layers")).to_be_visible(timeout=TUNING_MS)
        expect(page.locator("table.kernels tbody tr").first).to_be_visible(timeout=TUNING_MS)
        expect(page.locator("table.kernels")).to_contain_text("element-wise")
        shoot(page, "tuned")
        assert findings(page) == []
        page.emulate_media(color_scheme="dark")
        assert findings(page) == []
        page.emulate_media(color_scheme="light")

        _every_action(page, server)
        page.goto(page.url.split("#")[0] + "#/cache")
        expect(page.get_by_role("heading", name="In the folder")).to_be_visible()
        shoot(page, "cache")
        page.goto(page.url.split("#")[0] + "#/device")
        expect(page.get_by_text("apache-tvm-ffi")).to_be_visible()
        shoot(page, "device")


def _every_action(page: Page, server: RunningServer) -> None:
    """What the buttons promise is what the server says afterwards."""

    def state() -> str:
        return str(server.get("/v2/models/chain/tuning")[1]["state"])

    act(page, "pause", "tuning is now “paused”")
    assert state() == "paused"
    act(page, "roll_back", "tuning is now “baseline”")
    expect(page.locator(".badges .badge.baseline").last).to_have_text("answers: ONNX Runtime")
    expect(page.locator("#section-history")).to_contain_text("rolled back")
    shoot(page, "rolled-back")
    act(page, "start", "Tune now: done")
    expect(page.locator(".badges .badge.tuned").first).to_be_visible()
    wait_until(lambda: state() == "tuned", "what the cache holds serves again")
    act(page, "pin_baseline", "tuning is now “baseline”")
    act(page, "retune", "Tune anew: done")
    wait_until(lambda: state() in ("queued", "tuning", "tuned"), "it is tuned anew")
