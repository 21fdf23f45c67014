"""Keys: what is behind one, and that no key is ever told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests import models
from tests.process.support import EVERYTHING, answers
from tests.running import run_server

SECRET = "correct-horse-battery"
VARIABLES = {
    "HONE_HTTP_RESTRICTED_API": f"model-repository,logging:admin-key={SECRET}",
    "HONE_GRPC_RESTRICTED_PROTOCOL": f"model-repository:admin-key={SECRET}",
}


def test_management_behind_a_key(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *EVERYTHING, "--log-verbose=3", environment=VARIABLES) as server:
        assert answers(server, "m", 2.0), "inference is open"
        for headers in ({}, {"admin-key": "wrong"}, {"admin-key": ""}, {"admin-key": SECRET + "x"}):
            status, body, _ = server.call("POST", "/v2/repository/models/m/unload", b"", headers)
            assert status == 403, headers
            assert SECRET.encode() not in body
        assert answers(server, "m", 2.0)
        assert server.call("POST", "/v2/repository/models/m/unload", b"", {"Admin-Key": SECRET})[0] == 200
        with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
            with pytest.raises(InferenceServerException, match="restricted"):
                client.load_model("m")
            client.load_model("m", headers={"triton-grpc-protocol-admin-key": SECRET})
        assert answers(server, "m", 2.0)
        assert server.stop() == 0
        assert SECRET not in server.log


@pytest.mark.parametrize(
    "value", [f"no-such-group:key={SECRET}", f"logging:={SECRET}", f"logging,logging:key={SECRET}", f"logging={SECRET}"]
)
@pytest.mark.parametrize("place", ["flag", "variable", "file"])
def test_a_setting_that_is_refused_does_not_tell_the_key(tmp_path: Path, value: str, place: str) -> None:
    command = [sys.executable, "-m", "hone", "serve"]
    environment: dict[str, str] = {}
    if place == "flag":
        command += ["--http-restricted-api", value]
    elif place == "variable":
        environment["HONE_HTTP_RESTRICTED_API"] = value
    else:
        (tmp_path / "hone.toml").write_text(f'http_restricted_api = ["{value}"]', encoding="utf-8")
        command += ["--config", str(tmp_path / "hone.toml")]
    refused = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert refused.returncode == 2
    assert "http_restricted_api" in refused.stderr.lower().replace("-", "_")
    assert SECRET not in refused.stderr + refused.stdout
