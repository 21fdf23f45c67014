"""Runs the Dockerfile without Docker: its steps in order, each stage in a folder made by debootstrap, then the image.

For machines without a container engine. What it keeps of Docker: stages, build arguments, the .dockerignore, users, the
environment, the entry point as process 1 of a PID namespace, the health check, the stop signal. What differs: the base
image (Debian 12 with Debian's Python 3.11 stands for python:3.11-slim-bookworm), layers, limits and the network.

Needs root, debootstrap and util-linux:  python3 deploy/check_dockerfile.py [--build-arg DEVICE=cpu]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates")
READY_SECONDS = 60.0
STOP_SECONDS = 40.0
TUNED_SECONDS = 300.0


@dataclass
class Stage:
    """A stage as far as it was built: its root folder and what Docker would note in the image's configuration."""

    root: Path
    environment: dict[str, str]
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    settings: dict[str, str] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        return self.arguments | self.environment


def parse(text: str) -> list[tuple[str, str]]:
    """(KEYWORD, rest) of every instruction; comments are dropped, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    instructions = []
    for line in joined.splitlines():
        keyword, _, rest = line.strip().partition(" ")
        instructions.append((keyword.upper(), rest.strip()))
    return instructions


def substitute(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda match: variables.get(match[1] or match[2], ""), text)


def prepare_context(target: Path) -> None:
    """Copies what .dockerignore lets through. Understands the form used here: `*`, `!kept`, `**/left-out`."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    if patterns[0] != "*":
        raise SystemExit(f".dockerignore: expected `*` first, found {patterns[0]!r}")
    left_out = shutil.ignore_patterns(*(pattern[3:] for pattern in patterns if pattern.startswith("**/")))
    for kept in (pattern[1:] for pattern in patterns if pattern.startswith("!")):
        source, destination = ROOT / kept, target / kept
        destination.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, destination, ignore=left_out)
        else:
            shutil.copy2(source, destination)


def inside(root: Path, command: list[str], environment: dict[str, str], user: str, folder: str) -> list[str]:
    """The command line that runs `command` in `root`, as process 1 of namespaces of its own (mounts end with it)."""
    script = (
        'root=$1 user=$2 folder=$3; shift 3; mount -t proc proc "$root/proc"; mount -t tmpfs tmpfs "$root/dev/shm"; '
        'exec chroot --userspec="$user" "$root" /usr/bin/env --ignore-environment --chdir="$folder" "$@"'
    )
    assignments = [f"{name}={value}" for name, value in environment.items()]
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    return [*namespaces, "bash", "-euc", script, "bash", str(root), user, folder, *assignments, *command]


def outside_settings() -> dict[str, str]:
    """How this machine reaches its package index."""
    passed_on = re.compile(r"PIP_\w+|(https?|no)_proxy|SSL_CERT_\w+|REQUESTS_CA_BUNDLE", re.IGNORECASE)
    return {name: value for name, value in os.environ.items() if passed_on.fullmatch(name)}


def make_base(base: Path) -> None:
    """Debian 12 with what the base image adds to it: an interpreter named `python`, first on the path."""
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(base)], check=True, stdout=subprocess.DEVNULL)
    shutil.copy2("/etc/resolv.conf", base / "etc" / "resolv.conf")
    environment = {"PATH": os.defpath + ":/usr/sbin:/sbin", "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *BASE_PACKAGES]):
        subprocess.run(
            inside(base, ["apt-get", "-q", *command], environment, "0:0", "/"), check=True, stdout=subprocess.DEVNULL
        )
    bundle = "etc/ssl/certs/ca-certificates.crt"  # this machine's, in case it reaches its package index through a proxy
    shutil.copyfile(Path("/", bundle), base / bundle)
    (base / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3.11")


class Build:
    def __init__(self, work: Path, build_arguments: dict[str, str]) -> None:
        self._work = work
        self._build_arguments = build_arguments
        self._globals: dict[str, str] = {}
        self._stages: dict[str, Stage] = {}
        self._context = work / "context"

    def run(self, instructions: list[tuple[str, str]]) -> Stage:
        """Builds every stage, used or not: a step that fails is a fault of the Dockerfile either way."""
        prepare_context(self._context)
        stage: Stage | None = None
        for keyword, rest in instructions:
            print(f"--- {keyword} {rest[:150]}", flush=True)
            if keyword == "FROM":
                stage = self._from(rest)
            elif stage is None:
                self._argument(rest, self._globals, self._globals)
            else:
                self._step(stage, keyword, rest)
        if stage is None:
            raise SystemExit("Dockerfile: expected a FROM, found none")
        return stage

    def _from(self, rest: str) -> Stage:
        match = re.fullmatch(r"(\S+)(?: AS (\S+))?", substitute(rest, self._globals), re.IGNORECASE)
        if match is None:
            raise SystemExit(f"FROM: expected IMAGE [AS NAME], found {rest!r}")
        image, name = match[1], match[2] or "the image"
        parent = self._stages.get(image)
        if parent is None and not re.fullmatch(r"python:3\.11[\w.-]*-slim-bookworm", image):
            raise SystemExit(f"FROM: expected a stage or a python:3.11 image on Debian 12, found {image!r}")
        root = self._work / f"stage{len(self._stages)}"
        source = parent.root if parent else self._work / "base"
        subprocess.run(["cp", "--archive", "--reflink=auto", str(source.resolve()), str(root)], check=True)
        path = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        stage = Stage(root, dict(parent.environment) if parent else {"PATH": path})
        self._stages[name] = stage
        return stage

    def _argument(self, rest: str, target: dict[str, str], inherited: dict[str, str]) -> None:
        name, _, default = rest.partition("=")
        target[name] = self._build_arguments.get(name, default or inherited.get(name, ""))

    def _step(self, stage: Stage, keyword: str, rest: str) -> None:
        if keyword == "ARG":
            self._argument(rest, stage.arguments, self._globals)
        elif keyword == "ENV":
            for name, value in re.findall(r"(\w+)=(\S+)", rest):
                stage.environment[name] = substitute(value, stage.variables())
        elif keyword == "WORKDIR":
            stage.folder = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif keyword == "USER":
            stage.user = rest
        elif keyword == "COPY":
            self._copy(stage, rest.split())
        elif keyword == "RUN":
            environment = stage.variables() | outside_settings()
            subprocess.run(
                inside(stage.root, ["/bin/sh", "-c", rest], environment, stage.user, stage.folder), check=True
            )
        elif keyword in {"ENTRYPOINT", "CMD", "HEALTHCHECK", "STOPSIGNAL", "EXPOSE", "VOLUME"}:
            stage.settings[keyword] = rest
        else:
            raise SystemExit(f"{keyword}: this check does not know the instruction; teach it")

    def _copy(self, stage: Stage, words: list[str]) -> None:
        source_root = self._context
        if words[0].startswith("--from="):
            source_root = self._stages[words.pop(0).removeprefix("--from=")].root
        *sources, destination = words
        target = stage.root / (Path(stage.folder) / destination).as_posix().lstrip("/")
        for name in sources:
            source = source_root / name.lstrip("/")
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
            else:
                into = target / source.name if destination.endswith("/") or len(sources) > 1 else target
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, into)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def first_child(pid: int) -> int:
    """unshare's child: process 1 of the namespace, which is the server."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"failed: {what}")
    print(f"ok: {what}", flush=True)


def first_verdicts(url: str) -> tuple[list[str], dict[str, Any]]:
    """Outcomes of the gate on a model, as soon as there is one, with the status; none when the time is up before."""
    deadline = time.monotonic() + TUNED_SECONDS
    while True:
        with urllib.request.urlopen(url, timeout=10) as response:
            told: dict[str, Any] = json.load(response)
        verdicts = [bucket["outcome"] for bucket in told["buckets"] if bucket["outcome"] in {"passed", "refused"}]
        if verdicts or time.monotonic() > deadline:
            return verdicts, told
        time.sleep(1)


def try_image(stage: Stage) -> None:
    """Starts the image's command, asks its health check and the demo model, and stops it as Docker would."""
    shutil.copytree(ROOT / "model_repo" / "digits", stage.root / "models" / "digits")
    http_port, grpc_port, metrics_port = free_ports(3)
    environment = stage.environment | {
        "HONE_HTTP_PORT": str(http_port),
        "HONE_GRPC_PORT": str(grpc_port),
        "HONE_METRICS_PORT": str(metrics_port),
    }
    command = json.loads(stage.settings["ENTRYPOINT"]) + json.loads(stage.settings["CMD"])
    check = json.loads(stage.settings["HEALTHCHECK"].partition(" CMD ")[2])
    server = subprocess.Popen(inside(stage.root, command, environment, stage.user, stage.folder))
    try:
        deadline = time.monotonic() + READY_SECONDS
        health = inside(stage.root, check, environment, stage.user, stage.folder)
        while (
            healthy := subprocess.run(health, check=False, stderr=subprocess.DEVNULL).returncode == 0
        ) is False and time.monotonic() < deadline:
            if server.poll() is not None:
                break
            time.sleep(0.5)
        expect(healthy, f"{' '.join(command)}: healthy by its own health check")

        pid = first_child(server.pid)
        status = Path(f"/proc/{pid}/status").read_text()
        users = re.findall(r"^Uid:\s+(.*)$", status, re.MULTILINE)[0].split()
        expect(set(users) == {stage.user.partition(":")[0]}, f"runs as user {users[0]}, not as root")
        bound = Path(f"/proc/{pid}/net/tcp").read_text() + Path(f"/proc/{pid}/net/tcp6").read_text()
        for port in (http_port, grpc_port, metrics_port):
            expect(
                re.search(rf" 0+:{port:04X} 0+:0000 0A ", bound) is not None, f"port {port} listens on all addresses"
            )

        body = {"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": [0.5] * 64}]}
        url = f"http://127.0.0.1:{http_port}/v2/models/digits/infer"
        with urllib.request.urlopen(url, data=json.dumps(body).encode(), timeout=10) as response:
            answer = json.load(response)
        expect(answer["outputs"][0]["shape"] == [1, 10], "the model digits answers")

        verdicts, told = first_verdicts(f"http://127.0.0.1:{http_port}/v2/models/digits/tuning")
        expect(
            bool(verdicts), f"the image compiles and measures: digits is {told['state']} {verdicts} {told['reason']}"
        )

        os.kill(pid, getattr(signal, stage.settings["STOPSIGNAL"]))
        expect(server.wait(STOP_SECONDS) == 0, f"exit status 0 after {stage.settings['STOPSIGNAL']}")
    finally:
        server.kill()  # of a server that has ended: nothing; else unshare takes the server with it
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the Dockerfile's steps in a chroot, then the image.")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--base", type=Path, help="keep the base system in this folder, or take it from there")
    arguments = parser.parse_args()
    missing = [tool for tool in ("debootstrap", "unshare", "chroot") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        sys.exit(f"needs root and debootstrap, unshare, chroot; found uid {os.geteuid()}, missing {missing}")

    build_arguments = dict(argument.split("=", 1) for argument in arguments.build_arg)
    with tempfile.TemporaryDirectory(prefix="hone-image-") as name:
        work = Path(name)
        work.chmod(0o755)  # the image's user must reach its root
        base = arguments.base or work / "base"
        if not (base / "usr" / "local" / "bin" / "python").is_symlink():
            print("--- making the base system", flush=True)
            make_base(base)
        if base != work / "base":
            (work / "base").symlink_to(base.resolve())
        stage = Build(work, build_arguments).run(parse((ROOT / "Dockerfile").read_text()))
        try_image(stage)
    print("the Dockerfile's steps ran, and its image serves")


if __name__ == "__main__":
    main()
