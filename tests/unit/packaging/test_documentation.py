"""Documentation that is made from the code is current, and what is written by hand names what exists.

`make docs` builds the pages and finds broken links.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import get_args

import pytest
import yaml

from docs.generate import architecture, metrics
from hone.errors import ConfigError
from hone.frontends.http_openapi import openapi_document
from hone.frontends.http_routes import ROUTES
from hone.repository.accelerators import validate_accelerators
from hone.repository.config_text import parse_config
from hone.specialization import Signature
from hone.tuning.book import TunerCounters
from hone.tuning.metrics import TuningCollector
from hone.tuning.record import Bucket, Outcome

#: Named in order to say that it is not offered.
TRITON_ONLY = {"nv_inference_first_response_histogram_ms"}

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


def test_metrics_reference_is_current():
    page = (DOCS / "metrics_reference.md").read_text(encoding="utf-8")
    assert page == metrics.reference(), ".venv/bin/python -m docs.generate.metrics >docs/metrics_reference.md"


def test_metrics_reference_has_every_family_that_tuning_yields():
    page = metrics.reference()
    names = {metric.name for metric in TuningCollector(metrics.OneOfEach()).collect()}
    assert len(names) > 30
    assert [name for name in names if not re.search(rf"`{name}(_total)?`", page)] == []


def test_metrics_are_described_by_name_in_the_explaining_pages():
    """What the pages and the dashboard name exists: a series that was renamed leaves no trace."""
    families = {
        family.name for family in (*metrics.model_families(), *metrics.machine_families(), *metrics.tuning_families())
    }
    for page in ("metrics.md", "monitoring.md", "operation.md"):
        named = set(re.findall(r"`((?:nv|hone)_[a-z_]+[a-z])[`{(\[]", (DOCS / page).read_text(encoding="utf-8")))
        plain = {name if name in families else re.sub(r"_(bucket|sum|count)$", "", name) for name in named}
        assert plain - TRITON_ONLY - families - {name.removesuffix("_total") for name in families} == set(), page


def test_architecture_is_current():
    drawn = architecture.picture(architecture.read_imports(architecture.PACKAGE))
    kept = (DOCS / "architecture.svg").read_text(encoding="utf-8")
    assert kept == drawn, ".venv/bin/python -m docs.generate.architecture >docs/architecture.svg"
    ET.fromstring(kept)


def test_architecture_describes_every_part():
    parts = set(architecture.read_imports(architecture.PACKAGE)) - {architecture.GROUND}
    assert parts == set(architecture.PURPOSES)
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert [part for part in parts - {"metrics", "tracing", "logs"} if f"| `{part}` |" not in page] == []


def test_architecture_refuses_a_circle():
    with pytest.raises(ValueError, match="a -> b -> a"):
        architecture.heights({"a": {"b": 1}, "b": {"a": 1}})


def test_architecture_draws_what_the_sources_import(tmp_path):
    (tmp_path / "upper").mkdir()
    (tmp_path / "upper" / "one.py").write_text("from hone import lower\nimport hone.middle.deep\n")
    (tmp_path / "middle.py").write_text("from hone.lower import name\nimport os\n")
    (tmp_path / "lower.py").write_text("from hone.types import DType\n")
    counts = architecture.read_imports(tmp_path)
    assert counts == {"upper": {"lower": 1, "middle": 1}, "middle": {"lower": 1}, "lower": {"foundation": 1}}
    drawn = {("upper", "middle"), ("middle", "lower"), ("lower", "foundation")}
    assert set(architecture.necessary(counts)) == drawn
    assert architecture.heights(counts) == {"upper": 3, "middle": 2, "lower": 1, "foundation": 0}


def test_http_extension_names_every_path_field_and_action():
    page = (DOCS / "http_extension.md").read_text(encoding="utf-8")
    routes = [route for route in ROUTES if route.group == "tuning"]
    assert routes
    assert [route for route in routes if f"`{route.method} {route.path}`" not in page] == []
    schemas = openapi_document(ROUTES)["components"]["schemas"]
    actions, status = schemas["TuningAction"]["properties"]["action"]["enum"], schemas["TuningStatus"]["properties"]
    bucket = Bucket("", Signature(()), "").to_json()
    words = [*actions, *status, *status["state"]["enum"], *bucket, *filter(None, get_args(Outcome))]
    assert [word for word in words if f"`{word}`" not in page] == []


def test_operators_find_every_rollback_cause_explained():
    collected = {metric.name: metric for metric in TuningCollector(metrics.OneOfEach()).collect()}
    causes = {sample.labels["cause"] for sample in collected["hone_tuning_rollbacks"].samples}
    assert causes >= {"error", "outputs", "latency"}
    assert TunerCounters().num_rollbacks == {}, "causes are there at 0 before anything happened"
    assert all(sample.value == 0 for sample in collected["hone_tuning_rollbacks"].samples)


def fenced(page: str, language: str) -> list[str]:
    """The blocks of code of one language in a page."""
    blocks, opened = [], None
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if not line.startswith("```"):
            if opened == language:
                blocks[-1] += f"{line}\n"
        elif opened is None:
            opened = line.removeprefix("```")
            blocks.append("")
        else:
            opened = None
    return [block for block in blocks if block]


@pytest.mark.parametrize("page", ["coming_from_triton.md", "coming_from_torchserve.md", "precision.md"])
def test_examples_of_config_pbtxt_can_be_parsed(page):
    examples = [block for block in fenced(page, "") if "{" in block]
    assert examples
    for example in examples:
        config = parse_config(example.encode(), "m")
        foreign = "tensorrt" in example  # shown as what Triton has
        if foreign:
            with pytest.raises(ConfigError, match="tensorrt"):
                validate_accelerators(config, "m")
        else:
            validate_accelerators(config, "m")


@pytest.mark.parametrize("page", ["coming_from_tensorrt.md", "coming_from_torchserve.md"])
def test_examples_in_python_compile(page):
    examples = fenced(page, "python")
    assert examples
    for example in examples:
        compile(example, page, "exec")


def test_the_site_loads_nothing_from_elsewhere():
    configuration = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert configuration["theme"]["font"] is False
    assert "extra_javascript" not in configuration and "extra_css" not in configuration


def test_every_page_in_the_list_exists():
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for item in (entry if isinstance(entry, list) else entry.values()) for page in pages(item)]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert len(listed) == len(set(listed)) > 20
    assert [page for page in listed if not (DOCS / page).is_file()] == []
