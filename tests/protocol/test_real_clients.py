"""Triton's own clients, each in a process of its own: what they send and read is what users' programs do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import models
from tests.protocol.repository import PATIENT_QUEUE, counting, write_labelled
from tests.running import run_server

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("clients")
    models.write_model(root, "add_sub", models.add_sub(), config="max_batch_size: 8")
    for datatype in ("FP32", "FP16", "BF16", "FP64", "INT8", "UINT64", "BOOL", "BYTES"):
        models.write_model(root, f"identity_{datatype.lower()}", models.identity(datatype, ("batch", "n")))
    for version, factor in ((1, 2.0), (3, 3.0)):
        models.write_model(root, "versions", models.scale(factor), version=version, config="version_policy { all {} }")
    models.write_model(root, "slow", counting(), config=PATIENT_QUEUE + "instance_group { count: 4 }")
    write_labelled(root)
    flags = [f"--load-model={folder.name}" for folder in root.iterdir()]
    models.write_model(root, "late", models.identity())
    flags += ["--model-control-mode=explicit", "--allow-client-shm=true", "--allow-file-override=true"]
    with run_server(root, *flags) as running:
        yield running


@pytest.mark.parametrize("program", ["sync_http", "sync_grpc", "aio_http", "aio_grpc"])
def test_client(server, program):
    port = server.grpc_port if program.endswith("grpc") else server.http_port
    done = subprocess.run(
        [sys.executable, "-m", f"tests.protocol.clients.{program}", str(port)],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert done.stdout.count("ok ") >= 17, done.stdout
