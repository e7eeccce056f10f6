"""docs/operations.md names only settings, routes and metrics that exist."""

import re
from pathlib import Path

from fake_engine import FakeEngine
from pydantic import BaseModel

from server.api.admin import ADMIN_ENDPOINTS
from server.api.routes import ENDPOINTS
from server.config import LimitsSection, ObservabilitySection, SecuritySection, ServeConfig
from server.dashboard.routes import DASHBOARD_ENDPOINTS
from server.engine.async_engine import AsyncEngine
from server.observability.metrics import Metrics

TEXT = (Path(__file__).parents[2] / "docs/operations.md").read_text()
CODE = re.findall(r"`([^`\n]+)`", TEXT)


def has(schema: type[BaseModel], path: list[str]) -> bool:
    field = schema.model_fields.get(path[0])
    if field is None or len(path) == 1:
        return field is not None
    section = field.annotation
    return isinstance(section, type) and issubclass(section, BaseModel) and has(section, path[1:])


def test_every_setting_exists() -> None:
    dotted = {match for code in CODE for match in re.findall(r"^((?:server|scheduler|cache|model)\.[\w.]+[a-z])", code)}
    assert len(dotted) > 12
    assert not {name for name in dotted if not has(ServeConfig, name.split("."))} - {"server.security.tls_"}
    table = TEXT.partition("## Limits")[2].partition("All but those")[0]
    short = set(re.findall(r"`([a-z]+_[a-z_]+)`", table)) - {"max_model_len"}
    assert len(short) > 6
    assert all(name in LimitsSection.model_fields for name in short), short
    for name in ("api_keys_file", "admin_keys_file", "requests_per_minute", "tokens_per_minute", "tls_client_ca"):
        assert f"{name}" in TEXT
        assert name in SecuritySection.model_fields
    assert {"log_format", "access_log", "otlp_endpoint", "metrics_prefix"} <= ObservabilitySection.model_fields.keys()


def test_every_route_exists() -> None:
    known = {endpoint.path for endpoint in (*ENDPOINTS, *ADMIN_ENDPOINTS, *DASHBOARD_ENDPOINTS)}
    named = {match for code in CODE for match in re.findall(r"^(?:GET |POST )?(/[a-z][\w/-]*)$", code)}
    assert {"/live", "/ready", "/health", "/metrics"} <= named
    assert named - {"/admin/"} <= known
    for endpoint in ADMIN_ENDPOINTS:
        assert endpoint.path in TEXT


def test_every_metric_exists() -> None:
    engine = AsyncEngine(lambda _: FakeEngine())
    engine.stats = FakeEngine().stats()  # type: ignore[assignment]
    known = {re.sub("_(count|sum|bucket)$", "", name.partition(":")[2]) for name in Metrics(engine).names()}
    table = TEXT.partition("| metric |")[2].partition("`configs/monitoring/`")[0]
    named = set(re.findall(r"`(\w+)(?:\{\w+\})?`", table))
    assert len(named) > 20
    assert named <= known
