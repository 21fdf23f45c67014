"""Recording and alerting rules, as promtool sees them: they parse, fire when they should and stay silent otherwise."""

from __future__ import annotations

import re
import subprocess

import yaml

from tests.deploy.prometheus import DEPLOY, RULES, tool

TESTS = DEPLOY / "prometheus" / "tests" / "alerts_test.yml"
ROOT = DEPLOY.parent


def alerts() -> list[dict]:
    groups = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*arguments: str) -> None:
    ran = subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_promtool_accepts_configuration_and_rules():
    promtool("check", "config", "--lint-fatal", str(DEPLOY / "prometheus" / "prometheus.yml"))


def test_rules_fire_when_they_should():
    promtool("test", "rules", str(TESTS))


def test_every_alert_is_seen_firing_and_is_explained():
    fired = {
        case["alertname"]
        for test in yaml.safe_load(TESTS.read_text())["tests"]
        for case in test.get("alert_rule_test", [])
        if case["exp_alerts"]
    }
    names = {rule["alert"] for rule in alerts()}
    assert fired == names
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert set(re.findall(r"`(Hone\w+)`", page)) == names


def test_alerts_say_what_to_do():
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule
        assert rule["annotations"].keys() == {"summary", "description"}, rule
