"""A real browser: Debian's Chromium, headless. Every page must ask for nothing from elsewhere and report no error."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

WIDE = {"width": 1280, "height": 900}
#: Where screenshots stay to be looked at.
ARTIFACTS = Path(__file__).resolve().parents[2] / "test-artifacts" / "dashboard"
_PATIENCE_MS = 30_000


# Not for the whole session: while Playwright is open, its event loop counts as running in this thread.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.fail("no Chromium is installed: run `make test-deps` (on Debian: apt-get install chromium)")
    expect.set_options(timeout=_PATIENCE_MS)
    with sync_playwright() as playwright:
        # Its own sandbox needs rights that containers rarely give; the only pages shown are this server's.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab. At the end it must have asked nobody but the server on this machine, and have had no error of its own."""
    context = browser.new_context(viewport=WIDE, color_scheme="light")
    tab = context.new_page()
    tab.set_default_timeout(_PATIENCE_MS)
    elsewhere: list[str] = []
    errors: list[str] = []
    tab.on("request", lambda request: elsewhere.append(request.url) if _is_elsewhere(request.url) else None)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda told: errors.append(told.text) if told.type == "error" and _is_own(told.text) else None)
    yield tab
    context.close()
    assert not elsewhere
    assert not errors


def _is_elsewhere(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme not in ("blob", "data", "about") and parts.hostname != "127.0.0.1"


def _is_own(message: str) -> bool:
    """The browser logs each answer that is a refusal, and each connection that fails; the page shows them itself."""
    return not message.startswith("Failed to load resource")
