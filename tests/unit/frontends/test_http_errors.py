"""Errors over HTTP: every kind has a status, every answer its one form, and surprises stay inside."""

import json
import logging

import pytest

from hone.errors import ErrorKind, HoneError
from hone.frontends.http_errors import STATUS_OF_KIND, HttpError, answer_of, error_body


def test_every_kind_of_error_has_a_status():
    assert set(STATUS_OF_KIND) == set(ErrorKind)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (ErrorKind.INVALID_ARGUMENT, 400),
        (ErrorKind.ALREADY_EXISTS, 400),
        (ErrorKind.CANCELLED, 400),
        (ErrorKind.RESTRICTED, 403),
        (ErrorKind.NOT_FOUND, 404),
        (ErrorKind.INTERNAL, 500),
        (ErrorKind.UNSUPPORTED, 501),
        (ErrorKind.UNAVAILABLE, 503),
    ],
)
def test_kinds_map_to_statuses_as_in_triton(kind, status):
    error = HoneError("why")
    error.kind = kind
    given, headers, body, close = answer_of(error)
    assert given == status
    assert dict(headers) == {b"Content-Type": b"application/json"}
    assert json.loads(body) == {"error": "why"}
    assert not close


def test_a_surprise_is_logged_and_not_told(caplog):
    with caplog.at_level(logging.ERROR, logger="hone"):
        try:
            raise RuntimeError("the secret path")
        except RuntimeError as error:
            status, _, body, _ = answer_of(error, "r7")
    assert (status, json.loads(body)) == (500, {"error": "internal error"})
    assert "r7" in caplog.text
    assert "the secret path" in caplog.text
    assert "Traceback" in caplog.text


def test_a_closing_error_says_so():
    _, headers, _, close = answer_of(HttpError(408, "late", headers=((b"X", b"y"),), close=True))
    assert close
    assert dict(headers) == {b"Content-Type": b"application/json", b"X": b"y", b"Connection": b"close"}


def test_a_message_without_utf8_form_is_still_json():
    assert json.loads(error_body("model '\ud800'")) == {"error": "model '?'"}
