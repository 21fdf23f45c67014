"""gRPC behind TLS and mutual TLS, as the command line switches it on, with Triton's own client on the other side."""

import grpc as grpc_library
import pytest
from tritonclient.grpc import InferenceServerClient, InferenceServerException

from tests import models
from tests.running import run_server
from tests.unit.frontends.test_grpc_tls import issue


@pytest.fixture(scope="module")
def authority():
    return issue("authority")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, authority):
    made = tmp_path_factory.mktemp("tls")
    (made / "root.crt").write_bytes(authority.certificate_pem())
    for name, issuer in (("server", authority), ("client", authority), ("stranger", issue("another"))):
        identity = issue(name, issuer)
        (made / f"{name}.crt").write_bytes(identity.certificate_pem())
        (made / f"{name}.key").write_bytes(identity.key_pem())
    models.write_model(made / "models", "identity", models.identity())
    return made


def flags(folder, *more):
    return (
        "--grpc-use-ssl=true",
        f"--grpc-server-cert={folder}/server.crt",
        f"--grpc-server-key={folder}/server.key",
        *more,
    )


def live(server, folder, name=""):
    """Ask with tritonclient, with the certificate of `name` if given."""
    own = {"private_key": f"{folder}/{name}.key", "certificate_chain": f"{folder}/{name}.crt"} if name else {}
    client = InferenceServerClient(
        f"127.0.0.1:{server.grpc_port}", ssl=True, root_certificates=f"{folder}/root.crt", **own
    )
    try:
        return client.is_server_live(client_timeout=5)
    finally:
        client.close()


def test_tls(folder):
    with run_server(folder / "models", *flags(folder)) as server:
        assert live(server, folder)
        with grpc_library.insecure_channel(f"127.0.0.1:{server.grpc_port}") as plain:
            call = plain.unary_unary("/inference.GRPCInferenceService/ServerLive")
            with pytest.raises(grpc_library.RpcError) as caught:
                call(b"", timeout=5)
            assert caught.value.code() in (
                grpc_library.StatusCode.UNAVAILABLE,
                grpc_library.StatusCode.DEADLINE_EXCEEDED,
            )


def test_mutual_tls(folder):
    mutual = flags(folder, "--grpc-use-ssl-mutual=true", f"--grpc-root-cert={folder}/root.crt")
    with run_server(folder / "models", *mutual) as server:
        assert live(server, folder, "client")
        for name in ("", "stranger"):
            with pytest.raises(InferenceServerException):
                live(server, folder, name)
