"""An input by hand: a picture, an array, JSON; outputs with labels, and errors that help."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests import models
from tests.browser.support import open_page, shoot
from tests.running import RunningServer, run_server

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "examples" / "digits"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    shutil.copytree(ROOT / "model_repo" / "digits", repository / "digits")
    models.write_model(repository, "add_sub", models.add_sub())
    models.write_model(repository, "whole", models.identity("INT32"))
    with run_server(repository) as running:
        yield running


@pytest.mark.parametrize(
    ("picture", "digit"), [("seven.png", "seven"), ("seven_64x64.png", "seven"), ("two.png", "two")]
)
def test_a_picture(page: Page, server: RunningServer, picture: str, digit: str) -> None:
    open_page(page, server, "#/models/digits")
    page.get_by_label("File for image").set_input_files(PICTURES / picture)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#section-try tbody th").first).to_have_text(digit)
    expect(page.locator("#section-try .outcome")).to_contain_text("Answered in")
    if picture == "seven.png":
        shoot(page, "try-it")


def test_arrays_and_json(page: Page, server: RunningServer, tmp_path: Path) -> None:
    open_page(page, server, "#/models/add_sub")
    np.save(tmp_path / "a.npy", np.array([[1, 2, 3, 4]], np.float64))  # converted to the model's FP32
    (tmp_path / "b.json").write_text("[10, 20, 30, 40]")
    page.get_by_label("File for A").set_input_files(tmp_path / "a.npy")
    page.get_by_label("File for B").set_input_files(tmp_path / "b.json")
    page.get_by_role("button", name="Send").click()
    outputs = page.locator("#section-try pre")
    expect(outputs.nth(0)).to_have_text("11  22  33  44")
    expect(outputs.nth(1)).to_have_text("-9  -18  -27  -36")
    page.locator("#input-B").fill(json.dumps([[0.5, 0, 0, 0]]))
    page.get_by_role("button", name="Send").click()
    expect(outputs.nth(0)).to_have_text("1.5  2  3  4")


def test_what_does_not_fit_is_explained(page: Page, server: RunningServer, tmp_path: Path) -> None:
    open_page(page, server, "#/models/whole")
    outcome = page.locator("#section-try .outcome.failed")
    send = page.get_by_role("button", name="Send")
    send.click()
    expect(outcome).to_contain_text("'IN' is empty")
    page.locator("#input-IN").fill("[1, 2")
    send.click()
    expect(outcome).to_contain_text("not JSON")
    page.locator("#input-IN").fill("[[1, 2], [3]]")
    send.click()
    expect(outcome).to_contain_text("not all of the same length")
    page.locator("#input-IN").fill("[[1, 2, 3]]")
    send.click()
    expect(outcome).to_contain_text("expected shape [-1, 4]")
    np.save(tmp_path / "half.npy", np.array([[0.5, 1, 2, 3]], np.float32))
    page.get_by_label("File for IN").set_input_files(tmp_path / "half.npy")
    send.click()
    expect(outcome).to_contain_text("0.5 is no INT32")
    (tmp_path / "x.txt").write_text("1")
    page.get_by_label("File for IN").set_input_files(tmp_path / "x.txt")
    send.click()
    expect(outcome).to_contain_text("expected .npy, .json or a picture")
