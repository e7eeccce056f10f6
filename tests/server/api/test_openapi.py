"""/openapi.json and /docs: every route is there, the schemas are valid JSON Schema and agree with what is taken."""

import re

from live_server import LiveServer

from server.api.routes import ENDPOINTS


def test_every_route_is_described(server: LiveServer) -> None:
    document = server.get("/openapi.json").json()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(end.method, re.sub(r":\w+}", "}", end.path)) for end in ENDPOINTS}
    assert len({operation["operationId"] for m in document["paths"].values() for operation in m.values()}) == len(
        ENDPOINTS
    )


def test_bodies_are_described_field_by_field(server: LiveServer) -> None:
    document = server.get("/openapi.json").json()
    chat = document["components"]["schemas"]["ChatBody"]
    assert chat["additionalProperties"] is False
    assert set(chat["required"]) == {"model", "messages"}
    assert {"messages", "top_logprobs", "tools", "stop", "response_format"} <= set(chat["properties"])
    references = set(re.findall(r'"#/components/schemas/(\w+)"', server.get("/openapi.json").text))
    assert references <= set(document["components"]["schemas"])


def test_the_docs_page_loads_nothing_from_elsewhere(server: LiveServer) -> None:
    page = server.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert all(end.path.replace(":path", "") in page.text for end in ENDPOINTS)
    assert not re.findall(r'(?:src|href)="(?!openapi\.json")', page.text)
