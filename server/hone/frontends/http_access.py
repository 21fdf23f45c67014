"""Who may call what, which headers pass on to the model, and the id under which a request is logged."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping

from hone.config import RestrictedGroup
from hone.errors import InvalidRequest, Restricted
from hone.frontends.http_errors import Headers

#: Headers that one request may pass on as parameters.
MAX_FORWARDED = 64

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Restrictions:
    """Keys of the groups of endpoints that are behind one."""

    def __init__(self, groups: Iterable[RestrictedGroup]) -> None:
        self._keys = {
            name: (group.header, group.header.encode("latin-1"), group.value.encode("utf-8"))
            for group in groups
            for name in group.groups
        }

    def check(self, group: str, fields: Mapping[bytes, bytes]) -> None:
        """Raises Restricted unless the request carries the key of its group."""
        header = self.wanted(group, fields)
        if header:
            raise Restricted(f"This API is restricted, expecting header '{header}'")

    def wanted(self, group: str, fields: Mapping[bytes, bytes]) -> str:
        """Name of the header without whose key a request is refused; empty where it carries it or none is asked for.
        Compares in constant time."""
        key = self._keys.get(group)
        if key is None:
            return ""
        header, field, value = key
        return "" if hmac.compare_digest(fields.get(field, b""), value) else header


def check_same_site(fields: Mapping[bytes, bytes]) -> None:
    """Raises Restricted for what another site's page has a browser send: it may not load, unload or steer models.

    A browser on this machine reaches a server on loopback, and posts across sites without asking first; it says so in
    Sec-Fetch-Site, which pages cannot forge. Clients that are no browsers send no such header.
    """
    site = fields.get(b"sec-fetch-site", b"none")
    if site not in (b"none", b"same-origin"):
        raise Restricted(
            f"Control requests from pages of other sites are refused (Sec-Fetch-Site: {site.decode('latin-1')})"
        )


class HeaderForwarder:
    """Request headers that become request parameters, by lower-case name: those that `pattern` matches in full."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.IGNORECASE)

    def parameters(self, fields: Mapping[bytes, bytes]) -> dict[str, str]:
        """Raises InvalidRequest for more than MAX_FORWARDED headers."""
        forwarded: dict[str, str] = {}
        for name, value in fields.items():
            text = name.decode("latin-1")
            if self._pattern.fullmatch(text):
                forwarded[text] = value.decode("latin-1")
        if len(forwarded) > MAX_FORWARDED:
            raise InvalidRequest(f"{len(forwarded)} headers match the forward pattern, at most {MAX_FORWARDED} may")
        return forwarded


def echoed_request_id(fields: Mapping[bytes, bytes]) -> Headers:
    """The client's X-Request-ID, to be sent back as it came if it is printable and short; nothing otherwise."""
    value = fields.get(b"x-request-id")
    if value is None or not _REQUEST_ID.fullmatch(value):
        return ()
    return ((b"X-Request-ID", value),)
