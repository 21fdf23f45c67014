"""Endpoints behind a key: the page shows what it may, and does with the key what it may not without."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page, expect

from tests import models
from tests.browser.support import act, open_page, shoot
from tests.running import run_server

RESTRICTED = "--http-restricted-api=model-repository,tuning:admin-key=s3cret"


def give(page: Page, key: str) -> None:
    page.locator("#keys").click()
    page.get_by_label("admin-key").fill(key)
    page.get_by_role("button", name="Use these keys").click()
    expect(page.locator("#connection")).to_have_text("live")


def test_keys(page: Page, tmp_path: Path) -> None:
    models.write_model(tmp_path, "one", models.identity())
    flags = ("--model-control-mode=explicit", "--load-model=one", "--tuning=cache")
    with run_server(tmp_path, *flags, f"--kernels-cache={tmp_path / '.cache'}", RESTRICTED) as server:
        open_page(page, server, "#/models/one")
        expect(page.locator("#keys")).to_have_text("Keys needed")
        expect(page.locator("#section-tuning")).to_contain_text("behind a key (header admin-key)")
        act(page, "pause", "restricted")
        give(page, "wrong")
        expect(page.locator("#keys")).to_have_text("Keys needed")
        act(page, "unload", "restricted")
        assert server.get("/v2/models/one/ready")[0] == 200
        shoot(page, "keys")

        give(page, "s3cret")
        expect(page.locator("#keys")).to_have_text("Keys")
        expect(page.locator("#section-tuning dl")).to_be_visible()
        act(page, "pause", "tuning is now “paused”")
        act(page, "unload", "Unload: done")
        page.reload()  # the key stays in the tab
        expect(page.locator("#keys")).to_have_text("Keys")
        expect(page.locator("[data-action=load]")).to_be_enabled()


def test_what_is_behind_a_key_is_not_sent_without(tmp_path: Path) -> None:
    models.write_model(tmp_path, "one", models.identity())
    with run_server(tmp_path, "--tuning=cache", f"--kernels-cache={tmp_path / '.cache'}", RESTRICTED) as server:
        told = server.get("/dashboard/snapshot")[1]
        assert told["locked"] == {"model-repository": "admin-key", "tuning": "admin-key"}
        assert set(told["models"]["one"]) == {"stats"}
        _, body, _ = server.call("GET", "/dashboard/snapshot", headers={"admin-key": "s3cret"})
        assert b'"index"' in body
        for path in ("/dashboard/cache", "/dashboard/explain/one"):
            status, told = server.get(path)
            assert status == 403
            assert "expecting header 'admin-key'" in told["error"]
