"""Schemathesis over /openapi.json: whatever fits the schema or breaks it, no answer is a 5xx."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from live_server import TIMEOUT_S, LiveServer

from server.api.endpoint import Endpoint
from server.api.routes import ENDPOINTS

schemathesis = pytest.importorskip("schemathesis", reason='needs the extra "clients"')


@pytest.fixture(scope="module")
def schema(server: LiveServer) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.handler.__name__)
def test_no_answer_is_a_5xx(server: LiveServer, schema: Any, endpoint: Endpoint) -> None:
    operation = schema.find_operation_by_id(endpoint.handler.__name__)
    good, bad = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
    for mode in (good, bad) if endpoint.body else (good,):

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=8 if endpoint.body else 2,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        def call(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = "tiny"  # any other is a 404 and tests nothing
            reply = case.call(base_url=server.url, timeout=TIMEOUT_S)
            assert reply.status_code < 500, (case.body, reply.text)

        call()
