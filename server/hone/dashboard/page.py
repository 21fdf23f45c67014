"""The page's files, read once. They ask for nothing from elsewhere, and browsers are told to allow nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: Nothing but what this server sends: no inline script, no inline style, no frames, no forms.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Asked for again each time, and answered with 304 while it is the same: a page is never of two versions.
    "Cache-Control": "no-cache",
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    media_type: str
    etag: str


def read_assets(folder: Path = Path(__file__).parent / "assets") -> dict[str, Asset]:
    """By file name. Raises OSError where the installation lacks them."""
    assets = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            assets[path.name] = Asset(content, _TYPES[path.suffix], etag)
    if INDEX not in assets:
        raise FileNotFoundError(f"{folder}: expected {INDEX} of the dashboard, found {', '.join(assets) or 'nothing'}")
    return assets
