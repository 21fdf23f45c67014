"""deploy/kubernetes agrees with the server: its flags, ports, paths, user and how long it takes to stop.

`make check-deploy` holds the files against Kubernetes' schemas and KServe's types.
"""

from __future__ import annotations

import argparse
import re

import pytest
import yaml

from hone.cli.settings import add_arguments, read_settings
from hone.config import Settings
from hone.frontends.http_routes import ROUTES
from tests.deploy.prometheus import DEPLOY

ROOT = DEPLOY.parent
IMAGE = (ROOT / "Dockerfile").read_text()


def objects(path: str) -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / path).read_text()))


(STATEFUL_SET,) = objects("base/stateful-set.yaml")
(RUNTIME,) = objects("kserve/serving-runtime.yaml")
POD = STATEFUL_SET["spec"]["template"]["spec"]
CONTAINERS = {"base": POD["containers"][0], "kserve": RUNTIME["spec"]["containers"][0]}


def settings_of(container: dict) -> Settings:
    command, *flags = container["args"]
    assert command == "serve"
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_settings(parser.parse_args(flags), {})


@pytest.fixture(params=CONTAINERS)
def container(request) -> dict:
    return CONTAINERS[request.param]


def test_flags_are_known_and_ports_are_those_that_are_served(container):
    settings = settings_of(container)
    served = {settings.http_port, settings.grpc_port, settings.metrics_port}
    assert {port["containerPort"] for port in container["ports"]} <= served


def test_probes_ask_paths_that_exist(container):
    settings = settings_of(container)
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    paths = {route.path for route in ROUTES if route.method == "GET"}
    for name, path in (("startup", "ready"), ("readiness", "ready"), ("liveness", "live")):
        asked = container[f"{name}Probe"]["httpGet"]
        assert asked["path"] == f"/v2/health/{path}" and asked["path"] in paths
        assert named.get(asked["port"], asked["port"]) == settings.http_port


def test_the_pod_waits_longer_than_the_server_takes_to_stop():
    container = CONTAINERS["base"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] > pause + settings_of(container).exit_timeout_secs + 2


def test_the_user_is_the_image_s(container):
    user = int(re.search(r"^USER (\d+):(\d+)$", IMAGE, re.MULTILINE)[1])
    security = {**POD["securityContext"], **container["securityContext"]}
    assert security["runAsUser"] == user and security["runAsNonRoot"]
    assert POD["securityContext"]["fsGroup"] == user
    assert POD["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch", "hone refuses a cache others may write to"


def test_what_is_learned_is_kept_on_a_volume(container):
    place = re.search(r"HONE_KERNELS_CACHE=(\S+)", IMAGE)[1]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == place]
    assert not mount.get("readOnly")
    claims = STATEFUL_SET["spec"]["volumeClaimTemplates"] + RUNTIME["spec"]["volumes"]
    assert mount["name"] in {claim.get("name") or claim["metadata"]["name"] for claim in claims}


def test_the_cache_s_limit_fits_its_volume(container):
    limit_mib = settings_of(container).kernels_cache_mib
    (claim,) = (
        [*objects("kserve/kernels-cache.yaml")]
        if container is CONTAINERS["kserve"]
        else [STATEFUL_SET["spec"]["volumeClaimTemplates"][0]]
    )
    size_mib = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) * 1024
    assert 0 < limit_mib < size_mib


def test_keys_are_variables_that_the_server_reads():
    names = {entry["name"] for entry in CONTAINERS["base"]["env"]}
    assert {name.removeprefix("HONE_").lower() for name in names} <= Settings.model_fields.keys()


def test_services_lead_to_ports_of_the_pod():
    named = {port["name"] for port in CONTAINERS["base"]["ports"]}
    services = objects("base/service.yaml")
    assert STATEFUL_SET["spec"]["serviceName"] in {service["metadata"]["name"] for service in services}
    for service in services:
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named
        labels = STATEFUL_SET["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
