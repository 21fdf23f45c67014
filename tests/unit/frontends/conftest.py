"""Fixtures of the HTTP front end: one server with a fake service behind it, fresh for each test."""

import pytest

from tests.unit.frontends.http_serving import serving


@pytest.fixture
def served():
    with serving() as running:
        yield running
