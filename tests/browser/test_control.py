"""Loading and unloading by the page, and what happens when one thinks better of it."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page, expect

from tests import models
from tests.browser.support import act, open_page
from tests.running import run_server


def test_load_and_unload(page: Page, tmp_path: Path) -> None:
    models.write_model(tmp_path, "first", models.identity())
    models.write_model(tmp_path, "second", models.identity())
    with run_server(tmp_path, "--model-control-mode=explicit", "--load-model=first") as server:
        open_page(page, server)
        expect(page.locator("tbody tr", has_text="second")).to_contain_text("not loaded")
        page.get_by_role("link", name="second").click()
        expect(page.locator("[data-action=unload]")).to_be_disabled()

        page.locator("[data-action=load]").click()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert server.get("/v2/models/second/ready")[0] != 200

        act(page, "load", "Load: done")
        expect(page.locator(".badges .badge.READY")).to_be_visible()
        assert server.get("/v2/models/second/ready")[0] == 200
        act(page, "unload", "Unload: done")
        expect(page.locator("[data-action=unload]")).to_be_disabled()
        assert server.get("/v2/models/second/ready")[0] != 200
        assert server.get("/v2/models/first/ready")[0] == 200


def test_what_the_server_refuses_is_shown(page: Page, tmp_path: Path) -> None:
    models.write_model(tmp_path, "broken", b"not a model")
    with run_server(tmp_path, "--model-control-mode=explicit") as server:
        open_page(page, server, "#/models/broken")
        act(page, "load", "load failed for model 'broken'")
        expect(page.locator(".actions .outcome.failed")).to_be_visible()
        expect(page.locator(".reason")).not_to_be_empty()


def test_outside_explicit_mode_loading_is_the_servers_business(page: Page, tmp_path: Path) -> None:
    models.write_model(tmp_path, "one", models.identity())
    with run_server(tmp_path) as server:
        open_page(page, server, "#/models/one")
        expect(page.locator(".badges .badge.READY")).to_be_visible()
        for action in ("load", "unload", "start", "roll_back"):  # tuning is off as well
            expect(page.locator(f"[data-action={action}]")).to_be_disabled()
        expect(page.locator(".actions .hint")).to_contain_text("--model-control-mode=explicit")
        expect(page.locator("#section-tuning")).to_contain_text("--tuning=off")


def test_the_connection_comes_back_by_itself(page: Page, tmp_path: Path) -> None:
    models.write_model(tmp_path, "one", models.identity())
    with run_server(tmp_path) as server:
        open_page(page, server)
        expect(page.get_by_role("link", name="one", exact=True)).to_be_visible()
        port = server.http_port
        assert server.stop() == 0
        assert "did not end in time" not in server.log, "an open page must not hold up the server's end"
        expect(page.locator("#connection")).to_contain_text("connection lost")
    models.write_model(tmp_path, "two", models.identity())
    with run_server(tmp_path, f"--http-port={port}"):
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.get_by_role("link", name="two", exact=True)).to_be_visible()
