"""TLS and mutual TLS, with certificates made here."""

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tritonclient.grpc import service_pb2_grpc

from hone.config import Settings
from hone.frontends.grpc import GrpcServer
from hone.protos import service_pb
from tests.unit.frontends.grpc_fakes import FakeService, infer_request, serving


class Identity(NamedTuple):
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    def key_pem(self, password: bytes | None = None) -> bytes:
        protection = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        return self.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection)

    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)


def issue(name: str, issuer: Identity | None = None) -> Identity:
    """A certificate for 127.0.0.1, signed by `issuer`; without one, an authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
    )
    return Identity(key, builder.sign(issuer.key if issuer else key, hashes.SHA256()))


class Files(NamedTuple):
    authority: Identity
    certificate: Path
    key: Path
    root: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    authority = issue("authority")
    server = issue("server", authority)
    paths = Files(authority, folder / "server.crt", folder / "server.key", folder / "root.crt")
    paths.certificate.write_bytes(server.certificate_pem())
    paths.key.write_bytes(server.key_pem())
    paths.root.write_bytes(authority.certificate_pem())
    return paths


def tls(files: Files, **more):
    return {"grpc_use_ssl": True, "grpc_server_cert": files.certificate, "grpc_server_key": files.key, **more}


async def infer(port: int, credentials: grpc.ChannelCredentials | None):
    address = f"127.0.0.1:{port}"
    channel = grpc.aio.secure_channel(address, credentials) if credentials else grpc.aio.insecure_channel(address)
    async with channel:
        return await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(infer_request(), timeout=10)


def assert_shut_out(caught) -> None:
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_tls(files):
    service = FakeService()
    async with serving(service, **tls(files)) as server:
        trusting = grpc.ssl_channel_credentials(files.authority.certificate_pem())
        response = await infer(server.port, trusting)
        assert isinstance(response, service_pb.ModelInferResponse)
        stranger = grpc.ssl_channel_credentials(issue("stranger").certificate_pem())
        for credentials in (stranger, None):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(server.port, credentials)
            assert_shut_out(caught)
    assert len(service.requests) == 1


async def test_mutual_tls(files):
    service = FakeService()
    async with serving(service, **tls(files, grpc_use_ssl_mutual=True, grpc_root_cert=files.root)) as server:
        root = files.authority.certificate_pem()
        client = issue("client", files.authority)
        known = grpc.ssl_channel_credentials(root, client.key_pem(), client.certificate_pem())
        await infer(server.port, known)
        impostor = issue("client", issue("authority"))
        unknown = grpc.ssl_channel_credentials(root, impostor.key_pem(), impostor.certificate_pem())
        for credentials in (grpc.ssl_channel_credentials(root), unknown):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(server.port, credentials)
            assert_shut_out(caught)
    assert len(service.requests) == 1


async def start_fails(settings: Settings, message: str) -> None:
    server = GrpcServer(FakeService(), settings)
    with pytest.raises(OSError, match=message):
        await server.start()


async def test_a_key_of_another_certificate_is_refused_at_start(files, tmp_path):
    other = tmp_path / "other.key"
    other.write_bytes(issue("other").key_pem())
    settings = Settings(grpc_port=0, **tls(files, grpc_server_key=other))
    await start_fails(settings, "grpc_server_cert and grpc_server_key: expected a PEM certificate and its private key")


async def test_files_that_are_no_pem_are_refused_at_start(files, tmp_path):
    garbage = tmp_path / "garbage.crt"
    garbage.write_bytes(b"not a certificate")
    settings = Settings(grpc_port=0, **tls(files, grpc_server_cert=garbage))
    await start_fails(settings, "expected a PEM certificate and its private key")


async def test_an_encrypted_key_is_refused_at_start_not_asked_for(files, tmp_path):
    server = issue("server", files.authority)
    certificate, key = tmp_path / "server.crt", tmp_path / "server.key"
    certificate.write_bytes(server.certificate_pem())
    key.write_bytes(server.key_pem(b"password"))
    settings = Settings(grpc_port=0, **tls(files, grpc_server_cert=certificate, grpc_server_key=key))
    await start_fails(settings, "the private key is encrypted")
