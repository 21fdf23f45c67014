"""docs/settings.md says what the settings are."""

from __future__ import annotations

from pathlib import Path

from hone.cli.reference import SECTIONS, reference
from hone.config import Settings

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_page_is_current() -> None:
    made = reference()
    assert PAGE.read_text(encoding="utf-8") == made, (
        "docs/settings.md is not what the settings are: .venv/bin/python -m hone.cli.reference >docs/settings.md"
    )


def test_every_setting_is_described_in_a_section() -> None:
    names = list(Settings.model_fields)
    assert set(SECTIONS) <= set(names)
    assert names[0] in SECTIONS, "the first setting begins a section"
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert f"| `--{name.replace('_', '-')}` |" in reference()
