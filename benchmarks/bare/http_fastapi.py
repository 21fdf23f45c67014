"""The same work in a FastAPI route, to show what the framework costs on the tensor path.

``python -m benchmarks.bare.http_fastapi`` serves one identity model on a free loopback port and prints that port.
"""

from __future__ import annotations

import orjson
from fastapi import FastAPI, Request, Response

from benchmarks.bare.uvicorn_floor import serve
from benchmarks.bare.v2 import IdentityModel


def create_app() -> FastAPI:
    app = FastAPI(openapi_url=None)
    model = IdentityModel()

    @app.post("/v2/models/{name}/infer")
    @app.post("/v2/models/{name}/versions/{version}/infer")
    async def infer(request: Request) -> Response:
        head_size = int(request.headers["inference-header-content-length"])
        view = memoryview(await request.body())
        tensor = view[head_size:]
        head = model.infer(view[:head_size], len(tensor))
        return Response(
            b"".join((head, tensor)),
            media_type="application/octet-stream",
            headers={"inference-header-content-length": str(len(head))},
        )

    @app.get("/{path:path}")
    async def get(path: str) -> Response:
        answer = model.get(f"/{path}")
        content = orjson.dumps(answer or {"error": "Not Found"})
        return Response(content, status_code=404 if answer is None else 200, media_type="application/json")

    return app


if __name__ == "__main__":
    serve(create_app())
