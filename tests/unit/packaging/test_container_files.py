"""Dockerfile, compose file, Prometheus and Grafana configuration: what a machine without an engine can check of them.

`deploy/check_dockerfile.py` goes further, and needs root and debootstrap.
"""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from hone.config import Settings
from hone.metrics import Metrics

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("check_dockerfile", DEPLOY / "check_dockerfile.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


@pytest.fixture(scope="module")
def instructions(check):
    return check.parse((ROOT / "Dockerfile").read_text())


def only(instructions, keyword):
    (found,) = [rest for name, rest in instructions if name == keyword]
    return found


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_image_runs_as_nobody_in_particular_and_stops_gently(instructions):
    assert only(instructions, "USER") == "10001:10001"
    assert only(instructions, "STOPSIGNAL") == "SIGTERM"
    assert json.loads(only(instructions, "ENTRYPOINT")) == ["/opt/hone/bin/hone"]
    assert json.loads(only(instructions, "CMD"))[0] == "serve"
    assert "/v2/health/ready" in only(instructions, "HEALTHCHECK")


def test_image_names_settings_that_exist(instructions):
    named = {name for _, rest in instructions for name in re.findall(r"HONE_(\w+)=", rest)}
    assert "HTTP_ADDRESS" in named
    assert {name.lower() for name in named} <= Settings.model_fields.keys()


def test_context_has_everything_the_image_copies(check, instructions, tmp_path):
    check.prepare_context(tmp_path)
    sources = [word for name, rest in instructions if name == "COPY" for word in rest.split()[:-1]]
    copied = [source for source in sources if not source.startswith(("--from", "/"))]
    assert copied
    assert [source for source in copied if not (tmp_path / source).exists()] == []
    assert not list(tmp_path.rglob("__pycache__"))


def test_no_image_is_called_latest(instructions, compose):
    images = [service["image"] for service in compose["services"].values()]
    images += [
        rest.partition("=")[2] for name, rest in instructions if name == "ARG" and rest.startswith("PYTHON_IMAGE")
    ]
    assert len(images) == 4
    assert [image for image in images if not re.fullmatch(r"[\w./-]+:v?\d[\w.-]*", image)] == []


def test_ports_are_published_on_loopback_only(compose):
    ports = [port for service in compose["services"].values() for port in service["ports"]]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_compose_waits_longer_than_the_server_does(compose):
    grace = int(compose["services"]["hone"]["stop_grace_period"].removesuffix("s"))
    assert grace > Settings.model_fields["exit_timeout_secs"].default


def test_mounted_files_exist(compose):
    mounts = [volume for service in compose["services"].values() for volume in service["volumes"]]
    relative = [mount.split(":")[0] for mount in mounts if isinstance(mount, str) and mount.startswith(".")]
    assert relative
    assert [path for path in relative if not (DEPLOY / path).exists()] == []


def test_prometheus_scrapes_the_metrics_port(compose):
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in compose["services"]
    assert int(port) == Settings.model_fields["metrics_port"].default


def test_dashboard_uses_metrics_that_hone_exports():
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "serving.json").read_text())
    metrics = Metrics(CollectorRegistry(), allow_cpu_metrics=False, allow_gpu_metrics=False)
    exported = {family.name for family in metrics.describe()}
    metrics.close()
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    used = {name.removesuffix("_bucket") for name in re.findall(r"\bnv_\w+", " ".join(expressions))}
    assert len(used) > 20
    assert used <= exported


def test_dashboard_asks_the_provisioned_data_source():
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "serving.json").read_text())
    uids = {panel["datasource"]["uid"] for panel in dashboard["panels"] if "datasource" in panel}
    assert uids == {source["uid"]}


def test_parser_joins_lines_and_drops_comments(check):
    text = "# syntax\nFROM a AS b\nRUN one \\\n    # between\n    && two\nENV A=1 \\\n    B=2\n"
    assert check.parse(text) == [("FROM", "a AS b"), ("RUN", "one && two"), ("ENV", "A=1 B=2")]
