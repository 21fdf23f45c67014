"""The page's files: complete, from here alone, and such as the strict policy allows."""

from __future__ import annotations

import re

import pytest

from hone.dashboard.page import CONTENT_SECURITY_POLICY, INDEX, read_assets

ASSETS = read_assets()


def texts(suffix: str) -> list[tuple[str, str]]:
    return [(name, asset.content.decode("utf-8")) for name, asset in ASSETS.items() if name.endswith(suffix)]


def test_every_file_that_is_asked_for_is_there():
    html = ASSETS[INDEX].content.decode("utf-8")
    asked = re.findall(r'(?:src|href)="/dashboard/([^"]+)"', html)
    assert "app.js" in asked
    for name, script in texts(".js"):
        for found in re.findall(r'from "\./([^"]+)"', script):
            assert found in ASSETS, f"{name} imports {found}"
    assert set(asked) <= set(ASSETS)


def test_every_script_is_used():
    used = {found for _, script in texts(".js") for found in re.findall(r'from "\./([^"]+)"', script)}
    assert {name for name, _ in texts(".js")} == used | {"app.js"}


@pytest.mark.parametrize(("name", "text"), texts(".html") + texts(".js") + texts(".css"))
def test_nothing_comes_from_elsewhere(name, text):
    # SVG's namespace is a name, and a comment may say where a format is written down: neither is asked for.
    lines = [line for line in text.splitlines() if "www.w3.org" not in line and not line.lstrip().startswith("/**")]
    assert not re.search(r"https?://|url\(|@import|import\(", "\n".join(lines)), name


def test_nothing_is_inline_and_no_text_becomes_html():
    html = ASSETS[INDEX].content.decode("utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", html)
    for name, script in texts(".js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|new Function|document\.write", script), (
            name
        )
        assert '"style"' not in script and "style:" not in script, f"{name}: the policy allows no inline style"


def test_the_policy_allows_nothing_unsafe():
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "default-src 'none'" in CONTENT_SECURITY_POLICY
    assert not re.search(r"https?:|\*", CONTENT_SECURITY_POLICY)


def test_an_installation_without_the_page_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected index\.html of the dashboard"):
        read_assets(tmp_path)
