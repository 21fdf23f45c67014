"""Checks deploy/kubernetes without a cluster: every field against Kubernetes' own schemas, and KServe's types.

- Each object is validated by kubernetes-validate, strictly (a field that Kubernetes does not know is a fault), for the
  oldest and the newest release named below.
- KServe's ServingRuntime is read into the classes of the kserve package, which know its fields and which of them it
  needs; its containers and volumes are validated as those of a pod.
- Where kubectl is installed, each folder is also rendered by its Kustomize, and the result validated in the same way.

Nothing was applied to a cluster.  Needs what `make deploy-tools` installs:
.venv-deploy/bin/python deploy/check_kubernetes.py
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kserve
import kubernetes_validate
import yaml

FOLDER = Path(__file__).resolve().parent / "kubernetes"
VERSIONS = ("1.30.0", "1.37.0")
KSERVE_GROUP = "serving.kserve.io/"
PRIMITIVES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}

Object = dict[str, Any]


def objects(text: str) -> list[Object]:
    return [document for document in yaml.safe_load_all(text) if document]


def name_of(document: Object) -> str:
    return f"{document['kind']} {document['metadata']['name']}"


def kubernetes_faults(document: Object) -> Iterator[str]:
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as problem:
            place = "".join(f"[{part!r}]" for part in getattr(problem, "absolute_path", ()))
            yield f"{name_of(document)}{place}: {problem.message} (Kubernetes {version})"


def kserve_value(value: Any, kind: str, where: str) -> Any:
    """`value` as the kserve package's type `kind`. Raises ValueError for what the type does not have, or lacks."""
    if match := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list, found {value!r}")
        return [kserve_value(item, match[1], f"{where}[{index}]") for index, item in enumerate(value)]
    if match := re.fullmatch(r"dict\(str, (.+)\)", kind):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected a mapping, found {value!r}")
        return {key: kserve_value(item, match[1], f"{where}.{key}") for key, item in value.items()}
    if kind in PRIMITIVES:
        # A bool is an int to Python, and to nobody else.
        if not isinstance(value, PRIMITIVES[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise ValueError(f"{where}: expected {kind}, found {value!r}")
        return value
    cls = getattr(kserve, kind, None)
    if cls is None or not hasattr(cls, "attribute_map"):
        return value  # one of Kubernetes' own types: `pod_of` has them validated
    names = {json_name: name for name, json_name in cls.attribute_map.items()}
    unknown = value.keys() - names.keys()
    if unknown:
        raise ValueError(f"{where}: {kind} has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(names))}")
    fields = {
        names[key]: kserve_value(item, cls.openapi_types[names[key]], f"{where}.{key}") for key, item in value.items()
    }
    try:
        return cls(**fields)
    except ValueError as problem:
        raise ValueError(f"{where}: {problem}") from problem


def pod_of(runtime: Object) -> Object:
    """The pod that KServe would make of a runtime, less what it adds."""
    spec = {key: runtime["spec"][key] for key in ("containers", "volumes") if key in runtime["spec"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": runtime["metadata"]["name"]}, "spec": spec}


def faults(document: Object) -> Iterator[str]:
    if not document["apiVersion"].startswith(KSERVE_GROUP):
        yield from kubernetes_faults(document)
        return
    version = document["apiVersion"].removeprefix(KSERVE_GROUP)
    kind = f"{version.capitalize()}{document['kind']}"
    if not hasattr(kserve, kind):
        yield f"{name_of(document)}: the kserve package has no {kind}"
        return
    try:
        kserve_value(document, kind, name_of(document))
    except ValueError as problem:
        yield str(problem)
    yield from kubernetes_faults(pod_of(document))


def written(folder: Path) -> list[Object]:
    """The objects of the files that a kustomization names. A folder of another kustomization is looked at by itself."""
    (kustomization,) = objects((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    found = []
    for name in kustomization["resources"]:
        path = (folder / name).resolve()
        if path.is_dir():
            if not (path / "kustomization.yaml").is_file():
                raise SystemExit(f"{folder.name}/kustomization.yaml: {name} has no kustomization.yaml")
        elif path.is_file():
            found += objects(path.read_text(encoding="utf-8"))
        else:
            raise SystemExit(f"{folder.name}/kustomization.yaml: there is no {name}")
    unnamed = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml", *kustomization["resources"]}
    if unnamed:
        raise SystemExit(f"{folder.name}/kustomization.yaml does not name {', '.join(sorted(unnamed))}")
    return found


def rendered(folder: Path, kubectl: str) -> list[Object]:
    ran = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False)
    if ran.returncode != 0:
        raise SystemExit(f"kubectl kustomize {folder}: {ran.stderr}")
    return objects(ran.stdout)


def main() -> None:
    kubectl = shutil.which("kubectl")
    found: list[str] = []
    folders = sorted(path.parent for path in FOLDER.glob("*/kustomization.yaml"))
    if not folders:
        raise SystemExit(f"no kustomization in {FOLDER}")
    for folder in folders:
        checked = [*written(folder), *(rendered(folder, kubectl) if kubectl else [])]
        found += [f"{folder.name}: {fault}" for document in checked for fault in faults(document)]
        print(f"{folder.name}: {len(checked)} objects looked at")
    if kubectl is None:
        print("not rendered: kubectl is not installed")
    for fault in found:
        print(fault, file=sys.stderr)
    if found:
        sys.exit(f"{len(found)} faults in {FOLDER}")


if __name__ == "__main__":
    main()
