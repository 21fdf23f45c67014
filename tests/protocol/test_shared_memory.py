"""System shared memory, with the flag on: registration, inputs and outputs, and every way out of bounds."""

import os
import uuid
from pathlib import Path

import numpy as np
import pytest

from tests import models
from tests.protocol.repository import PATIENT_QUEUE, counting, write_labelled
from tests.protocol.slow_requests import LONG, Background, running
from tests.protocol.wire import Input, Output, accepted, from_raw, invalid, raw_bytes, raw_input, refused, sample
from tests.running import run_server, wait_until

DIRECTORY = Path("/dev/shm")
SIZE = 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("shared")
    models.write_model(root, "add_sub", models.add_sub())
    for datatype in ("FP32", "BYTES", "FP16", "BF16", "BOOL"):
        models.write_model(root, f"identity_{datatype.lower()}", models.identity(datatype, ("batch", "n")))
    write_labelled(root)
    models.write_model(root, "slow", counting(), config=PATIENT_QUEUE)
    with run_server(root, "--allow-client-shm=true") as running:
        yield running


class Region:
    """An object in shared memory, and its name in the server."""

    def __init__(self, name="region", size=SIZE):
        self.name = name
        self.key = f"/hone-test-{uuid.uuid4().hex}"
        self.path = DIRECTORY / self.key[1:]
        self.path.write_bytes(bytes(size))

    def read(self, offset, size):
        return self.path.read_bytes()[offset : offset + size]

    def write(self, offset, data):
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(data)


@pytest.fixture
def region(client):
    made = Region()
    accepted(client.register(made.name, made.key, SIZE))
    yield made
    accepted(client.unregister())
    made.path.unlink(missing_ok=True)


def place(offset, size, name="region"):
    return {
        "shared_memory_region": name,
        "shared_memory_byte_size": size,
        **({"shared_memory_offset": offset} if offset else {}),
    }


def stored(region, name, datatype, array, offset=0):
    """An input whose data lies in the region."""
    data = raw_bytes(datatype, array)
    region.write(offset, data)
    return Input(name, datatype, np.shape(array), parameters=place(offset, len(data)))


# --- what works


@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "FP16", "BF16", "BOOL"])
@pytest.mark.parametrize("offset", [0, 64, 13])
def test_both_ways(client, region, datatype, offset):
    given = sample(datatype, (2, 5))
    size = len(raw_bytes(datatype, given))
    output = Output("OUT", parameters=place(2048, size + 100))
    answer = client.infer(f"identity_{datatype.lower()}", [stored(region, "IN", datatype, given, offset)], [output])
    told = answer["OUT"]
    assert (told.datatype, told.shape, told.array) == (datatype, (2, 5), None)
    assert told.parameters == place(2048, size)
    result = from_raw(datatype, (2, 5), region.read(2048, size))
    assert result.tolist() == given.tolist() or result.tobytes() == given.tobytes()


def test_the_forms_may_be_mixed(client, region):
    a, b = np.full((1, 4), 3, np.float32), np.full((1, 4), 1, np.float32)
    outputs = [Output("SUM", parameters=place(1024, 16)), Output("DIFFERENCE", binary=True)]
    answer = client.infer("add_sub", [stored(region, "A", "FP32", a), raw_input("B", "FP32", b)], outputs)
    assert answer["DIFFERENCE"].tolist() == [[2] * 4]
    assert answer["SUM"].array is None
    assert np.frombuffer(region.read(1024, 16), np.float32).tolist() == [4] * 4


def test_classification_into_shared_memory(client, region):
    output = Output("OUT", parameters={"classification": 1, **place(0, 512)})
    answer = client.infer("labelled", [raw_input("IN", "FP32", [[0, 2, 1, 0]])], [output])
    size = answer["OUT"].parameters["shared_memory_byte_size"]
    assert from_raw("BYTES", answer["OUT"].shape, region.read(0, size)).tolist() == [[b"2.000000:1:dog"]]


def test_status(client, region):
    other = Region("other")
    accepted(client.register("other", other.key, 100, offset=28))
    try:
        both = accepted(client.regions())
        assert both == {
            "region": {"key": region.key, "offset": 0, "byte_size": SIZE},
            "other": {"key": other.key, "offset": 28, "byte_size": 100},
        }
        assert accepted(client.regions("other")) == {"other": both["other"]}
        accepted(client.unregister("other"))
        assert set(accepted(client.regions())) == {"region"}
    finally:
        other.path.unlink()


def test_offset_of_the_region_and_of_the_tensor_add_up(client):
    made = Region()
    try:
        accepted(client.register("region", made.key, 1000, offset=96))
        made.write(96 + 4, np.array([7, 8], np.float32).tobytes())
        given = Input("IN", "FP32", (1, 2), parameters=place(4, 8))
        assert client.infer("identity_fp32", [given])["OUT"].tolist() == [[7, 8]]
        made.write(96 + 992, np.array([9, 10], np.float32).tobytes())
        given.parameters = place(992, 8)
        assert client.infer("identity_fp32", [given])["OUT"].tolist() == [[9, 10]]
        given.parameters = place(993, 8)
        invalid(client.infer("identity_fp32", [given]), "Invalid offset")
    finally:
        accepted(client.unregister())
        made.path.unlink()


def test_unregister_all(client, region):
    accepted(client.unregister())
    assert accepted(client.regions()) == {}
    accepted(client.unregister("region"))
    accepted(client.register(region.name, region.key, SIZE))


# --- what is refused


@pytest.mark.row(67)
def test_name_exists(client, region):
    answer = client.register("region", region.key, SIZE)
    refused(answer, 400, "ALREADY_EXISTS", "shared memory region 'region' already in manager")


@pytest.mark.row(67)
def test_unknown_region(client, region):
    says = "Unable to find shared memory region: 'nothing'"
    refused(client.regions("nothing"), 404, "NOT_FOUND", says)
    given = Input("IN", "FP32", (1, 2), parameters=place(0, 8, "nothing"))
    refused(client.infer("identity_fp32", [given]), 404, "NOT_FOUND", says)
    output = Output("OUT", parameters=place(0, 8, "nothing"))
    answer = client.infer("identity_fp32", [raw_input("IN", "FP32", [[1, 2]])], [output])
    refused(answer, 404, "NOT_FOUND", says)


@pytest.mark.row(67)
@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, SIZE + 1), (1, SIZE), (SIZE, 1), (0, 0), (SIZE + 1, 1), (2**62, 2**62), (0, 2**63 - 1), (2**63 - 1, 1)],
)
def test_range_of_a_registration(client, offset, size):
    made = Region()
    try:
        invalid(client.register("ranged", made.key, size, offset), "Invalid offset")
        assert accepted(client.regions()) == {}
    finally:
        made.path.unlink()


@pytest.mark.row(67)
@pytest.mark.parametrize("offset", [SIZE, SIZE - 7, 2**32, 2**62, 2**63 - 8, 2**64 - 8])
@pytest.mark.parametrize("side", ["input", "output"])
def test_range_of_a_tensor(client, region, offset, side):
    parameters = place(offset, 8)
    if side == "input":
        answer = client.infer("identity_fp32", [Input("IN", "FP32", (1, 2), parameters=parameters)])
    else:
        outputs = [Output("OUT", parameters=parameters)]
        answer = client.infer("identity_fp32", [raw_input("IN", "FP32", [[1, 2]])], outputs)
    assert region.key[1:] not in invalid(answer, "Invalid offset"), "who knows a key may register it"


@pytest.mark.row(67)
@pytest.mark.parametrize("parameters", [{"shared_memory_byte_size": -8}, {"shared_memory_offset": -1}])
def test_negative_range(client, region, parameters):
    given = Input("IN", "FP32", (1, 2), parameters={**place(0, 8), **parameters})
    invalid(client.infer("identity_fp32", [given]), next(iter(parameters)))


@pytest.mark.row(25)
@pytest.mark.parametrize("size", [7, 9, 0])
def test_size_that_is_not_that_of_the_shape(client, region, size):
    given = Input("IN", "FP32", (1, 2), parameters=place(0, size))
    invalid(client.infer("identity_fp32", [given]), "input byte size mismatch for input 'IN'", f"got {size}")


def test_output_that_does_not_fit(client, region):
    outputs = [Output("OUT", parameters=place(0, 7))]
    before = region.read(0, 64)
    answer = client.infer("identity_fp32", [raw_input("IN", "FP32", [[1, 2]])], outputs)
    invalid(answer, "shared memory size", "'OUT'", "8 bytes")
    assert region.read(0, 64) == before


@pytest.mark.parametrize(
    "parameters",
    [
        {"shared_memory_region": "region"},
        {"shared_memory_byte_size": 8},
        {"shared_memory_offset": 8},
        {"shared_memory_region": 5, "shared_memory_byte_size": 8},
        {"shared_memory_region": "region", "shared_memory_byte_size": "8"},
        {"shared_memory_region": "region", "shared_memory_byte_size": True},
    ],
    ids=str,
)
def test_incomplete_or_mistyped_place(client, region, parameters):
    invalid(client.infer("identity_fp32", [Input("IN", "FP32", (1, 2), parameters=parameters)]))


@pytest.mark.parametrize(
    "key",
    ["", "/", "..", "/..", "../etc/passwd", "/../../etc/passwd", "a/b", "no\0thing", "/hone-test-nothing", "x" * 5000],
    ids=lambda key: repr(key[:20]),
)
def test_key_that_is_no_plain_name(client, key):
    message = invalid(client.register("odd", key, 8), "'odd'")
    assert "etc" not in message and "/dev/shm" not in message, "what was opened is told"


def test_links_are_not_followed(client, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * SIZE)
    link = DIRECTORY / f"hone-test-{uuid.uuid4().hex}"
    link.symlink_to(secret)
    try:
        invalid(client.register("link", link.name, 8), "'link'")
    finally:
        link.unlink()


def test_empty_region_name(client):
    answer = client.register("", "k", 8)
    assert answer.status in (400, 404, "INVALID_ARGUMENT") and "name" in answer.error


def test_object_that_shrank(client, region):
    """Reading past the object's end would kill the server."""
    os.truncate(region.path, 4)
    given = Input("IN", "FP32", (1, 2), parameters=place(0, 8))
    invalid(client.infer("identity_fp32", [given]), "smaller")
    accepted(client.ready())


@pytest.mark.parametrize("remove", [False, True])
def test_unregistered_while_in_use(client, region, remove):
    """A request that has begun keeps its view: it ends well, into memory that nobody else sees any more."""
    given = stored(region, "IN", "FP32", np.array([[LONG]], np.float32))
    first = Background(client, "slow", [given])
    wait_until(lambda: running(client, "slow"), "the first request runs")
    accepted(client.unregister("region"))
    if remove:
        region.path.unlink()
    assert first.join()["OUT"].tolist() == [[LONG]]
    refused(client.infer("slow", [given]), 404, "NOT_FOUND", "Unable to find shared memory region")


def test_strings_in_shared_memory_that_run_past_the_end(client, region):
    region.write(0, (2**31).to_bytes(4, "little") + b"abc")
    given = Input("IN", "BYTES", (1, 1), parameters=place(0, 7))
    invalid(client.infer("identity_bytes", [given]), "incomplete string data")


@pytest.mark.parametrize("call", ["status", "register", "unregister"])
@pytest.mark.parametrize("name", ["", "r"])
def test_cuda_shared_memory_is_not_offered(client, call, name):
    refused(client.cuda(call, name), 501, "UNIMPLEMENTED", "CUDA shared memory is not supported")
