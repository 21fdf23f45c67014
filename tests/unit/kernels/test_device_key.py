"""What tells one kind of device from another, read from files as Linux has them."""

from __future__ import annotations

import copy
import json

import pytest

from hone.kernels import DeviceKey
from hone.kernels.device_key import compiler_version, device_from_file, package_version, x86_level

CPUINFO = """processor\t: {number}
vendor_id\t: AuthenticAMD
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC 9755
stepping\t: 1
cpu MHz\t\t: {mhz}
microcode\t: 0xb002116
flags\t\t: fpu vme {flags} hypervisor spec_ctrl

"""
V3 = "cx16 lahf_lm popcnt pni sse sse2 sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.fixture
def machine(tmp_path):
    """Files of a machine, and how to write other ones."""

    def write(*, flags=V4, mhz="2600.1", l2="1024K", quota="max 100000", name="AMD EPYC 9755"):
        proc, system = tmp_path / "proc", tmp_path / "sys"
        (proc / "self").mkdir(parents=True, exist_ok=True)
        text = "".join(CPUINFO.format(number=number, mhz=mhz, flags=flags) for number in range(2))
        (proc / "cpuinfo").write_text(text.replace("AMD EPYC 9755", name))
        (proc / "self" / "cgroup").write_text("0::/pod/container\n")
        group = system / "fs" / "cgroup" / "pod"
        group.mkdir(parents=True, exist_ok=True)
        (group / "cpu.max").write_text(f"{quota}\n")
        for index, (level, kind, size) in enumerate(
            [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", l2), ("3", "Unified", "32M")]
        ):
            folder = system / "devices" / "system" / "cpu" / "cpu0" / "cache" / f"index{index}"
            folder.mkdir(parents=True, exist_ok=True)
            for file, value in (("level", level), ("type", kind), ("size", size)):
                (folder / file).write_text(f"{value}\n")
        return {"proc": proc, "system": system, "machine": "x86_64", "compiler": "no-such-compiler"}

    return write


def test_it_says_what_the_machine_is(machine):
    key = DeviceKey.for_cpu(**machine(), cores=2)
    assert key.fields["features"] == sorted(V4.split())
    assert key.fields["caches"] == {
        "L1 Data": 48 << 10,
        "L1 Instruction": 32 << 10,
        "L2 Unified": 1 << 20,
        "L3 Unified": 32 << 20,
    }
    assert key.fields["toolchain"]["cxx"] == "none"
    assert key.name == "AMD EPYC 9755 (AuthenticAMD 26 2 1), 2 cores, x86-64-v4"


def test_what_changes_from_minute_to_minute_is_no_part_of_it(machine):
    one = DeviceKey.for_cpu(**machine(), cores=2)
    assert DeviceKey.for_cpu(**machine(mhz="3700.0", flags=f"{V4} new_mitigation"), cores=2) == one


@pytest.mark.parametrize(
    "other",
    [
        {"flags": V3},
        {"flags": f"{V4} avx512_bf16"},
        {"l2": "2048K"},
        {"quota": "150000 100000"},
        {"name": "AMD EPYC 9655"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_machine_has_another_key(machine, other):
    one = DeviceKey.for_cpu(**machine(), cores=2)
    assert DeviceKey.for_cpu(**machine(**other), cores=2) != one


def test_cores_and_code_generation_are_part_of_it(machine):
    files = machine()
    keys = {
        DeviceKey.for_cpu(**files, cores=2),
        DeviceKey.for_cpu(**files, cores=1),
        DeviceKey.for_cpu(**files, cores=2, llvm="x86_64-unknown-linux-gnu znver5"),
    }
    assert len(keys) == 3


def changed(value):
    match value:
        case None:
            return 1.5
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}!"
        case list():
            return [*value, "more"]
    raise AssertionError(value)


def places(fields, prefix=()):
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from places(value, (*prefix, name))
        else:
            yield (*prefix, name)


def test_each_field_of_this_machine_changes_the_digest():
    key = DeviceKey.for_cpu()
    digests = {key.digest}
    all_places = list(places(key.fields))
    assert {("toolchain", "tvm"), ("toolchain", "cxx"), ("features",), ("cores",), ("name",)} <= set(all_places)
    for place in all_places:
        fields = copy.deepcopy(dict(key.fields))
        at = fields
        for name in place[:-1]:
            at = at[name]
        at[place[-1]] = changed(at[place[-1]])
        digests.add(DeviceKey(fields).digest)
    assert len(digests) == 1 + len(all_places)


def test_the_architecture_is_of_instruction_sets_alone(machine):
    one = DeviceKey.for_cpu(**machine(), cores=2)
    assert one.architecture.startswith("x86-64-v4-")
    assert DeviceKey.for_cpu(**machine(l2="2048K"), cores=8).architecture == one.architecture
    assert DeviceKey.for_cpu(**machine(flags=f"{V4} avx512_bf16"), cores=2).architecture != one.architecture


@pytest.mark.parametrize(
    ("flags", "level"), [(V4, "x86-64-v4"), (V3, "x86-64-v3"), ("sse sse2", "x86-64"), ("avx512f", "x86-64")]
)
def test_a_level_needs_all_of_its_sets_and_of_the_levels_below(flags, level):
    assert x86_level(flags.split()) == level


def test_the_tightest_quota_counts(machine):
    files = machine(quota="250000 100000")
    container = files["system"] / "fs" / "cgroup" / "pod" / "container"
    container.mkdir()
    (container / "cpu.max").write_text("max 100000\n")
    assert DeviceKey.for_cpu(**files, cores=4).fields["cpu_quota"] == 2.5


def test_a_machine_that_tells_nothing_still_has_a_key(tmp_path):
    key = DeviceKey.for_cpu(proc=tmp_path, system=tmp_path, machine="riscv64", cores=1, compiler="no-such-compiler")
    assert key.fields["caches"] == {}
    assert key.architecture.startswith("riscv64-")


def test_an_arm_machine_is_told_by_its_part_numbers(tmp_path):
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
        "CPU variant\t: 0x1\nCPU part\t: 0xd40\n\n"
    )
    key = DeviceKey.for_cpu(proc=tmp_path, system=tmp_path, machine="aarch64", cores=1, compiler="no-such-compiler")
    assert key.fields["name"] == "aarch64 (0x41 8 0x1 0xd40)"
    assert key.fields["features"] == ["asimd", "fp", "sve"]


def test_a_gpu_key_has_its_architecture_as_it_is():
    key = DeviceKey({"kind": "cuda", "name": "NVIDIA H200", "architecture": "sm_90a"})
    assert key.architecture == "sm_90a"
    assert key.name == "NVIDIA H200, sm_90a"


def test_a_compiler_that_fails_or_is_not_there_is_none(tmp_path):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert compiler_version(str(broken)) == "none"
    assert compiler_version(str(tmp_path / "absent")) == "none"
    broken.write_text("#!/bin/sh\necho 12.2.0\n")
    assert compiler_version(str(broken)) == "g++ 12.2.0"


def test_a_package_is_told_by_version_and_what_was_built():
    version, _, build = package_version("apache-tvm-ffi").partition("+")
    assert version and len(build) == 12
    assert package_version("no-such-package") == "none"


def test_it_survives_its_file_and_a_changed_file_is_not_believed(tmp_path):
    key = DeviceKey.for_cpu()
    path = tmp_path / "device.json"
    path.write_bytes(key.to_bytes())
    assert device_from_file(path, key.digest) == key
    told = json.loads(path.read_bytes())
    told["fields"]["cores"] += 1
    path.write_text(json.dumps(told))
    assert device_from_file(path, key.digest) is None
    path.write_text("{")
    assert device_from_file(path, key.digest) is None
    assert device_from_file(tmp_path / "absent", key.digest) is None
