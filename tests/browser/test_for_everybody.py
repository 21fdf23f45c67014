"""axe-core finds nothing serious on any page; the keyboard gets everywhere; a phone shows all; a hundred models fit."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests import models
from tests.browser.support import PHONE, findings, open_page, shoot, turn_to_phone
from tests.running import RunningServer, run_server

ROOT = Path(__file__).resolve().parents[2]
NUM_MODELS = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    shutil.copytree(ROOT / "model_repo" / "digits", repository / "digits")
    for number in range(1, NUM_MODELS):
        models.write_model(repository, f"model{number:03}", models.identity())
    with run_server(repository, "--tuning=cache", f"--kernels-cache={repository / '.cache'}") as running:
        yield running


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("place", ["#/", "#/models/digits", "#/cache", "#/device"])
def test_axe_finds_nothing(page: Page, server: RunningServer, place: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    open_page(page, server, place)
    if place == "#/device":
        expect(page.locator("dl")).to_be_visible()
    if place == "#/models/digits":
        expect(page.get_by_label("File for image")).to_be_visible()
    assert findings(page) == []
    turn_to_phone(page)
    assert findings(page) == []


def test_axe_finds_nothing_in_a_dialog(page: Page, server: RunningServer) -> None:
    open_page(page, server, "#/models/digits")
    page.locator("[data-action=roll_back]").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert findings(page) == []
    shoot(page, "dialog")


def test_the_keyboard_is_enough(page: Page, server: RunningServer) -> None:
    open_page(page, server)
    expect(page.get_by_role("link", name="digits")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the content")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type("digi")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="digits")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("digits")
    action = page.locator("[data-action=pause]")
    action.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(action).to_be_focused()


def test_a_chart_is_read_with_arrow_keys(page: Page, server: RunningServer) -> None:
    open_page(page, server, "#/models/digits")
    row = [[[0.5] * 8] * 8]
    tensor = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": row}
    assert server.post("/v2/models/digits/infer", {"inputs": [tensor]})[0] == 200
    chart = page.locator("svg.chart").first
    expect(page.locator(".legend").first).to_contain_text("ONNX Runtime p50")
    assert "ONNX Runtime p50" in (chart.get_attribute("aria-label") or "")
    chart.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".readout").first).to_contain_text("baseline p50")


def test_a_phone_shows_all(page: Page, server: RunningServer) -> None:
    turn_to_phone(page)
    for place in ("#/", "#/models/digits", "#/cache", "#/device"):
        open_page(page, server, place)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], f"{place} is {width} pixels wide"
    open_page(page, server, "#/models/digits")
    expect(page.get_by_label("File for image")).to_be_visible()
    shoot(page, "phone-model")
    open_page(page, server)
    page.get_by_role("searchbox").fill("model00")
    shoot(page, "phone-list")


def test_a_hundred_models(page: Page, server: RunningServer) -> None:
    open_page(page, server)
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(NUM_MODELS)
    page.evaluate("window.firstRow = document.querySelector('tbody tr')")
    data = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    for number in range(1, NUM_MODELS):
        assert server.post(f"/v2/models/model{number:03}/infer", data)[0] == 200
    expect(page.locator("tr", has_text="model099")).to_contain_text(re.compile(r"\d (µs|ms)"))
    assert page.evaluate("window.firstRow === document.querySelector('tbody tr')"), "rows are changed, not made anew"
    shoot(page, "hundred-models")
    page.get_by_role("searchbox").fill("model04")
    expect(rows).to_have_count(10)
    page.get_by_role("searchbox").fill("nothing like that")
    expect(page.get_by_text("No model's name contains")).to_be_visible()
    shoot(page, "nothing-found")
