"""What the tests of the page share."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.conftest import ARTIFACTS
from tests.running import RunningServer

PHONE = {"width": 390, "height": 844}


def open_page(page: Page, server: RunningServer, place: str = "") -> None:
    page.goto(f"http://127.0.0.1:{server.http_port}/{place}")
    expect(page.locator("#connection")).to_have_text("live")


def turn_to_phone(page: Page) -> None:
    """The viewport of a phone; back when the page has been laid out in it and its observers of sizes have run."""
    page.set_viewport_size(PHONE)
    page.wait_for_function("width => innerWidth === width", arg=PHONE["width"])
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def shoot(page: Page, name: str) -> None:
    """Screenshots of what is shown now, light and dark."""
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    page.mouse.move(0, 0)
    page.evaluate("scrollTo(0, 0)")
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.screenshot(path=ARTIFACTS / f"{name}-{scheme}.png", full_page=True, animations="disabled")


def findings(page: Page) -> list[str]:
    """What axe-core has against the page as it is now; empty where nothing matters."""
    violations = Axe().run(page).response["violations"]
    return [
        f"{found['impact']} {found['id']}: {[node['target'] for node in found['nodes']][:5]}"
        for found in violations
        if found["impact"] in ("moderate", "serious", "critical")
    ]


def act(page: Page, action: str, answer: str) -> None:
    """Press an action's button and say yes; wait for what it tells."""
    page.locator(f"[data-action={action}]").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    dialog.locator("button.primary, button.danger").click()
    expect(dialog).to_have_count(0)
    expect(page.locator(".actions .outcome")).to_contain_text(answer)
