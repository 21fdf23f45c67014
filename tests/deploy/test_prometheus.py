"""Debian's Prometheus scrapes a server that tunes, loads the rules, and answers every query of the dashboard."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator

import pytest
import yaml

from tests import models
from tests.deploy.prometheus import DEPLOY, RULES, Prometheus, run_prometheus
from tests.process.test_tuning_end_to_end import DIMS, IMAGE, chain
from tests.running import RunningServer, run_server, wait_until

#: What Grafana puts in for its variables. The window holds many scrapes and the test's own traffic.
VARIABLES = {"$model": ".*", "$__rate_interval": "30s"}
#: Families that this test's server cannot have: of a GPU, and of Triton's response cache, which hone refuses.
ABSENT = re.compile(r"\b(nv_gpu_|nv_energy_|nv_cache_)\w+")

DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "serving.json").read_text())


def substitute(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, f"this test does not know a variable in {expression}"
    return expression


QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
] + [pytest.param(annotation["expr"], id=annotation["name"]) for annotation in DASHBOARD["annotations"]["list"]]


def send(server: RunningServer, count: int) -> None:
    tensor = {"name": "IN", "datatype": "FP32", "shape": list(DIMS), "parameters": {"binary_data_size": IMAGE.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    for _ in range(count):
        status, answer, _ = server.call("POST", "/v2/models/chain/infer", head + IMAGE.tobytes(), headers)
        assert status == 200, answer


def send_until(server: RunningServer, prometheus: Prometheus, expression: str) -> None:
    """Rules look at rates, which are of what grows between scrapes: so requests go on until they show."""
    deadline = time.monotonic() + 60
    while not prometheus.values(expression):
        assert time.monotonic() < deadline, f"no data within 60 s: {expression}"
        send(server, 25)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Of a server whose model answered on the baseline, was tuned and swapped, and answered again."""
    root = tmp_path_factory.mktemp("monitored")
    models.write_model(root / "models", "chain", chain())
    flags = ("--tuning=on", f"--kernels-cache={root / 'cache'}", "--kernels-cache-mib=512")
    with run_server(root / "models", *flags) as server, run_prometheus(root, server.metrics_port) as prometheus:
        path = "/v2/models/chain/tuning"
        wait_until(lambda: server.post(path, {"action": "pause"})[0] == 200, "tuning can be paused")
        wait_until(prometheus.has_scraped, "Prometheus has scraped the server")
        status, _ = server.post("/v2/models/chain/infer", {"inputs": []})
        assert status == 400
        send_until(server, prometheus, 'hone:execution_p99_us:5m{engine="onnxruntime"}')
        assert server.post(path, {"action": "start"})[0] == 200
        settled = wait_until(
            lambda: (told := server.get(path)[1])["state"] not in ("queued", "tuning", "paused") and told,
            "tuning ends",
            seconds=240,
        )
        assert settled["buckets"][0]["engine"] == "tvm", settled
        send_until(server, prometheus, "hone:execution_p99:ratio_to_baseline")
        yield prometheus


@pytest.mark.timeout(420)
def test_rules_are_loaded_and_evaluated_without_errors(prometheus: Prometheus) -> None:
    expected = {
        rule.get("record") or rule["alert"]
        for path in RULES.glob("*.yml")
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    }

    def rules() -> list[dict]:
        found = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        return found if all(rule["health"] != "unknown" for rule in found) else []

    loaded = wait_until(rules, "every rule was evaluated")
    assert {rule["name"] for rule in loaded} == expected
    assert [(rule["name"], rule.get("lastError")) for rule in loaded if rule["health"] != "ok"] == []
    firing = [rule["name"] for rule in loaded if rule.get("state") == "firing"]
    assert firing == [], "a server that is well sets off no alarm"


@pytest.mark.timeout(420)
@pytest.mark.parametrize("expression", QUERIES)
def test_the_dashboard_has_data(prometheus: Prometheus, expression: str) -> None:
    values = prometheus.values(substitute(expression))
    if ABSENT.search(expression):
        assert values == [], "this server has it after all: take it off ABSENT"
    else:
        assert values, f"no data for {expression}"
        assert not all(math.isnan(value) for value in values), f"only 0/0 for {expression}"


@pytest.mark.timeout(420)
def test_the_variable_lists_the_models(prometheus: Prometheus) -> None:
    (variable,) = DASHBOARD["templating"]["list"]
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
    assert prometheus.get(f"label/{label}/values", **{"match[]": name}) == ["chain"]
