"""Dashboard and alert rules name metrics that exist, in PromQL that parses, and each alert says what to do."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import semel
from semel.broker.loop_watch import LoopWatch
from semel.broker.metrics_page import serve_metrics
from semel.metrics.parts import REGISTRY
from semel.testing.embedded import EmbeddedBroker

FILES = files("semel.metrics").joinpath("files")
DASHBOARD: dict[str, Any] = json.loads(FILES.joinpath("dashboard.json").read_text())
ALERTS: dict[str, Any] = yaml.safe_load(FILES.joinpath("alerts.yml").read_text())
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
SEMEL = [sys.executable, "-c", "from semel.cli.entry import main; main()", "metrics"]
COMMANDS = ("advise", "broker", "doctor", "inspect", "tail")


@pytest.fixture(scope="module")
def labels_by_name() -> dict[str, set[str]]:
    """Every metric of a broker that somebody has used, and of the pipelines, with its labels."""
    with EmbeddedBroker(fsync="never") as broker:
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics("orders")
        server = broker.call(lambda: serve_metrics(broker.broker, 0, LoopWatch(is_measuring=True)))
        connection = http.client.HTTPConnection("127.0.0.1", server.sockets[0].getsockname()[1], timeout=30)
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        connection.close()
        broker.call(server.close)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page + semel.metrics.text()):
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        for suffix in suffixes:
            found[family.name + suffix] = {label for sample in family.samples for label in sample.labels}
    for metric in REGISTRY.families():
        for name in [name for name in found if name.startswith(f"semel_{metric.name}")]:
            found[name] |= {*metric.labels, "le"}
    return found


@pytest.mark.parametrize("query", [*QUERIES, *(rule["expr"] for rule in RULES)])
def test_a_query_parses_and_every_metric_in_it_exists(query: str, labels_by_name: dict[str, set[str]]) -> None:
    """By a parser of PromQL, and with labels that the metric has."""
    promql_parser.parse(query.replace("$__rate_interval", "5m"))
    named = re.findall(r"\bsemel_\w+", query)
    assert named
    assert set(named) <= set(labels_by_name), query
    for match in re.finditer(r"by \(([\w, ]+)\)", query):
        wanted = {label.strip() for label in match[1].split(",")} - {"instance"}
        assert wanted <= set().union(*(labels_by_name[name] | {"code"} for name in named)), query


def test_a_parser_that_accepts_anything_would_be_noticed() -> None:
    """The checker above can fail."""
    with pytest.raises(ValueError, match=r"."):
        promql_parser.parse("sum by (rate(x[5m])")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    """With a severity, an action in sentences, and only commands and labels that there are."""
    assert rule["labels"]["severity"] in ("critical", "warning")
    summary, action = rule["annotations"]["summary"], rule["annotations"]["action"]
    assert action.endswith(".")
    assert len(action.split()) >= 8
    assert set(re.findall(r"`semel (\w+)", action)) <= set(COMMANDS)
    in_labels = set(re.findall(r"\$labels\.(\w+)", summary + action)) - {"instance"}
    if in_labels and " by (" in rule["expr"]:
        kept = {label.strip() for match in re.findall(r"by \(([\w, ]+)\)", rule["expr"]) for label in match.split(",")}
        assert in_labels <= kept
    assert rule["alert"].startswith("Semel")


def test_the_alerts_have_names_of_their_own() -> None:
    """Prometheus takes two of one name; people do not."""
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names))


def test_the_dashboard_is_one_that_grafana_can_import() -> None:
    """Panels lie beside each other on 24 columns and use the chosen Prometheus; ids are unique."""
    assert DASHBOARD["schemaVersion"] >= 36
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["title"]


@pytest.mark.parametrize(("command", "text"), [("dashboard", "dashboard.json"), ("alerts", "alerts.yml")])
def test_the_command_prints_the_file(command: str, text: str) -> None:
    """As it is in the package."""
    done = subprocess.run([*SEMEL, command], capture_output=True, text=True, check=True)
    assert done.stdout == FILES.joinpath(text).read_text()


def test_the_page_of_the_docs_describes_every_metric_and_alert() -> None:
    """docs/watching.md names each; those that the parts have in common by the sink's."""
    page = Path(__file__).parents[2].joinpath("docs", "watching.md").read_text()
    described = set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
    assert {rule["alert"] for rule in RULES} <= described
    for name in re.findall(r"^# TYPE (semel_\w+) ", semel.metrics.text(), re.MULTILINE):
        assert {name, re.sub("^semel_(session|relay|mirror|both)_", "semel_sink_", name)} & described, name


def test_the_list_names_what_the_page_has() -> None:
    """For people and programs."""
    done = subprocess.run([*SEMEL, "list", "--json"], capture_output=True, text=True, check=True)
    names = [one["name"] for one in json.loads(done.stdout)]
    assert "semel_relay_retries_total" in names
    assert all(f"# TYPE {name} " in semel.metrics.text() for name in names)
