"""Whole request bodies, inflated where the client compressed them, never more than the limit."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from hone.frontends.http_compression import accepted_encoding, compress, content_encoding, inflate
from hone.frontends.http_errors import Headers
from hone.frontends.http_exchange import Exchange
from hone.frontends.http_tensors import Buffer

#: Responses from this size on are compressed in a thread: zlib lets go of the interpreter, and the loop must not wait.
THREAD_BYTES = 32 * 1024


class BodyCoder:
    """Reads request bodies and compresses response bodies. `limit` is in bytes, before and after inflating."""

    def __init__(self, limit: int, pool: Executor) -> None:
        self.limit = limit
        self._pool = pool

    async def read(self, exchange: Exchange) -> Buffer:
        """Raises HttpError (a limit, an unknown encoding), InvalidRequest (corrupt), Disconnected."""
        encoding = content_encoding(exchange.fields.get(b"content-encoding"))
        body = exchange.whole_body()
        if body is None:
            body = await exchange.read_body()
        if encoding is None:
            return body
        # Always in the thread: how large a small body becomes is the client's choice.
        return await asyncio.get_running_loop().run_in_executor(self._pool, inflate, body, encoding, self.limit)

    async def compress(self, exchange: Exchange, headers: Headers, parts: list[Buffer]) -> tuple[Headers, list[Buffer]]:
        """Headers and body as the client's Accept-Encoding wants them."""
        encoding = accepted_encoding(exchange.fields.get(b"accept-encoding", b""))
        if encoding is None:
            return headers, parts
        if sum(map(len, parts)) < THREAD_BYTES:
            body = compress(parts, encoding)
        else:
            body = await asyncio.get_running_loop().run_in_executor(self._pool, compress, parts, encoding)
        return (*headers, (b"Content-Encoding", encoding.encode("ascii")), (b"Vary", b"Accept-Encoding")), [body]
