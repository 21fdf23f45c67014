"""`hone cache`: what it prints, what it returns, and that a wrong word gets a clear answer."""

from __future__ import annotations

import argparse
import json

import pytest

from hone.cli import cache as command
from hone.errors import HoneError
from hone.kernels import DeviceKey, KernelsCache
from tests.unit.kernels.support import ARCHITECTURE, DEVICE, key

GPU = DeviceKey({"kind": "cuda", "name": "NVIDIA H200", "architecture": "sm_90a"})


@pytest.fixture
def hone(root, capsys, monkeypatch):
    """Runs `hone cache ...` on the folder: exit code and what it printed."""
    monkeypatch.delenv("HONE_KERNELS_CACHE", raising=False)

    def run(action, *arguments, folder=root):
        parser = argparse.ArgumentParser()
        command.add_parser(parser.add_subparsers())
        flags = ["--kernels-cache", str(folder)] if folder is not None else []
        parsed = parser.parse_args(["cache", action, *flags, *arguments])
        code = parsed.run(parsed)
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def filled(cache):
    cache.describe(GPU)
    cache.publish("kernels", key(1), ARCHITECTURE, {"kernel.so": bytes(2048)}, {"flags": ["-O3"]})
    cache.publish("decisions", key(2), GPU.digest, {"decision.json": b"{}"}, {})
    cache.publish("artifacts", key(3), DEVICE, {"module.so": bytes(1000)}, {"speedup": 1.5})
    return cache


def test_ls_lists_the_last_used_first(hone, filled):
    filled.get("kernels", key(1), ARCHITECTURE)
    code, out = hone("ls")
    assert code == 0
    lines = out.splitlines()
    assert f"device {GPU.digest[:12]}  NVIDIA H200, sm_90a" in lines
    assert f"device {DEVICE[:12]}  unknown" in lines
    shown = [line.split()[0] for line in lines if line.startswith(("kernels", "decisions", "artifacts"))]
    assert shown == ["kernels", "artifacts", "decisions"]
    assert "3 entries" in lines[-1]


def test_ls_as_json(hone, filled):
    code, out = hone("ls", "--json", "--kind", "kernels")
    told = json.loads(out)
    assert code == 0
    assert told["devices"] == {GPU.digest: GPU.name, DEVICE: None}
    (entry,) = told["entries"]
    assert (entry["kind"], entry["scope"], entry["digest"]) == ("kernels", ARCHITECTURE, key(1))
    assert entry["size_bytes"] == told["size_bytes"] > 2048


def test_the_folder_comes_from_the_environment_too(hone, filled, root, monkeypatch):
    monkeypatch.setenv("HONE_KERNELS_CACHE", str(root))
    code, out = hone("ls", "--json", folder=None)
    assert code == 0
    assert len(json.loads(out)["entries"]) == 3


@pytest.mark.parametrize("action", [("ls",), ("show", "abcd"), ("verify",), ("gc",), ("export", "x.tar")])
def test_a_folder_without_a_cache_is_told_and_not_made(hone, root, action):
    with pytest.raises(HoneError, match="no kernels cache in"):
        hone(*action)
    assert not root.exists()


def test_show_prints_manifest_and_quarantine(hone, filled):
    filled.strike(key(3), DEVICE, "latency", "slower by 5 %")
    code, out = hone("show", key(3)[:10])
    assert code == 0
    assert '"speedup": 1.5' in out
    assert "slower by 5 %" in out
    code, out = hone("show", key(2), "--json")
    (shown,) = json.loads(out)
    assert shown["device"]["name"] == GPU.name
    assert shown["files"] == {"decision.json": 2}
    assert shown["proven"] is True


def test_show_tells_of_damage_and_leaves_it(hone, filled):
    path = filled.get("artifacts", key(3), DEVICE).files["module.so"]
    path.write_bytes(b"x")
    code, out = hone("show", key(3))
    assert code == 1
    assert "corrupt" in out
    assert path.exists()


@pytest.mark.parametrize(
    ("digest", "told"), [("0000000000", "no entry"), ("xyz", "no digest"), ("ab", "at least 4"), ("../..", "no digest")]
)
def test_show_of_what_is_not_there(hone, filled, digest, told):
    with pytest.raises(HoneError, match=told):
        hone("show", digest)


def test_verify_fails_when_something_is_wrong(hone, filled):
    assert hone("verify") == (0, "3 sound, 0 not\n")
    filled.get("artifacts", key(3), DEVICE).files["module.so"].write_bytes(b"x")
    code, out = hone("verify")
    assert code == 1
    assert out.startswith("corrupt")
    assert key(3) in out
    code, out = hone("verify", "--json")
    assert code == 1
    assert json.loads(out)["problems"][0]["reason"] == "corrupt"
    assert hone("verify", "--remove")[0] == 0
    assert hone("verify") == (0, "2 sound, 0 not\n")


def test_gc_removes_the_unusable_and_then_the_least_used(hone, filled):
    filled.get("artifacts", key(3), DEVICE).files["module.so"].write_bytes(b"x")
    code, out = hone("gc", "--json")
    assert code == 0
    assert json.loads(out)["num_removed"] == 1
    assert json.loads(out)["num_evicted"] == 0
    code, out = hone("gc", "--max-size", "1K", "--json")
    assert json.loads(out)["num_evicted"] == 1
    assert [entry.name.kind for entry in filled.entries()] == ["decisions"]


def test_gc_says_when_running_processes_keep_it_large(hone, filled):
    assert filled.hold(filled.get("kernels", key(1), ARCHITECTURE))
    code, out = hone("gc", "--max-size", "0")
    assert code == 0
    assert "1 entries are in use" in out


def test_export_and_import(hone, filled, tmp_path):
    file, target = tmp_path / "export.tar", tmp_path / "target"
    code, out = hone("export", str(file))
    assert code == 0
    assert out.startswith("3 entries")
    code, out = hone("import", str(file), folder=target)
    assert code == 0
    assert out.splitlines()[0] == "imported 1 decisions; 0 were there already"
    assert "1 artifacts, 1 kernels" in out
    assert "--trust-binaries" in out
    code, out = hone("import", str(file), "--trust-binaries", "--json", folder=target)
    assert json.loads(out)["num_imported"] == {"artifacts": 1, "kernels": 1}
    assert KernelsCache(target).verify().num_sound == 3


def test_a_corrupt_export_is_told_by_file(hone, tmp_path):
    (tmp_path / "bad.tar").write_bytes(b"x" * 2000)
    with pytest.raises(HoneError, match=r"cannot import .*bad\.tar"):
        hone("import", str(tmp_path / "bad.tar"))


def test_an_unsafe_folder_is_told_with_the_cure(hone, filled):
    filled.path.chmod(0o777)
    with pytest.raises(HoneError, match="chmod 0700"):
        hone("ls")


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1000", 1000), ("1K", 1024), ("1.5 MiB", 3 << 19), ("2GB", 2 << 30), ("1t", 1 << 40), ("7B", 7)],
)
def test_sizes(text, size):
    assert command.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1X", "one", "1e9", "inf", "1 2"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        command.parse_size(text)


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")])
def test_sizes_for_people(size, text):
    assert command.format_size(size) == text


def test_quarantine_lists_and_pardon_forgets(hone, filled):
    filled.quarantine(key(3), DEVICE, "wrong on a live request", "outputs")
    filled.strike(key(4), GPU.digest, "death", "a server died")
    code, out = hone("quarantine")
    assert code == 0
    assert f"{key(3)[:16]}  device {DEVICE[:12]}  wrong on a live request" in out
    assert "suspected: 1 x death" in out
    assert out.endswith("1 kept out, of 2 with a record\n")
    code, out = hone("pardon", key(3)[:12], "--json")
    assert code == 0
    assert json.loads(out) == [{"digest": key(3), "device": DEVICE, "was": "wrong on a live request"}]
    assert filled.quarantined(key(3), DEVICE) is None
    with pytest.raises(HoneError, match="nothing is held against"):
        hone("pardon", key(3)[:12])
    with pytest.raises(HoneError, match="is no digest"):
        hone("pardon", "../x")
