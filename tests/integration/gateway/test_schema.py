"""Requests that Schemathesis makes up from the document: none is answered with a 500, each as documented."""

from __future__ import annotations

from typing import Any

import pytest
from harness.gateway import Gateway
from hypothesis import HealthCheck, Phase, given, settings

from toc.gateway.app import CALLS
from toc.gateway.openapi import document

TRIES = settings(
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
"""So many requests for each call, the same in each run. Some are made up with every run, in test_refused."""


@pytest.mark.chaos
def test_no_made_up_request_is_answered_otherwise_than_documented(shared: Gateway) -> None:
    import schemathesis  # a second of a processor, for each process of a run
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    excluded = [
        not_a_server_error,  # 503 is documented; 500 is looked for below
        positive_data_acceptance,  # a value may fit the document and not the system: a time in the past
    ]
    schema = schemathesis.openapi.from_dict(shared.call("GET", "/openapi.json").body)
    operations: list[Any] = [found.ok() for found in schema.get_all_operations()]  # type: ignore[union-attr]
    address = f"http://127.0.0.1:{shared.port}"
    headers = {"Authorization": f"Bearer {shared.tokens['all']}"}
    made = 0
    for operation in operations:

        def call(case: Any) -> None:
            nonlocal made
            made += 1
            response = case.call(base_url=address, headers=headers)
            assert response.status_code not in (500, 502), response.text
            case.validate_response(response, excluded_checks=excluded)

        TRIES(given(operation.as_strategy())(call))()  # type: ignore[no-untyped-call]
    assert made > 100
    assert "call_failed" not in shared.told()
    assert "Traceback" not in shared.told()


def test_the_document_has_nothing_that_generators_trip_over() -> None:
    found = document(CALLS)
    schemas = found["components"]["schemas"]
    assert not [name for name in schemas if "__" in name], "two schemas of one name"

    def look(node: Any, where: str) -> None:
        if isinstance(node, dict):
            assert not isinstance(node.get("title"), str) or where == "/info", where
            assert "*/*" not in node, where
            assert "default" not in node or where.endswith("/responses"), where
            for key, value in node.items():
                look(value, f"{where}/{key}")
        elif isinstance(node, list):
            for value in node:
                look(value, where)

    look(found, "")
    for name in ("Leases", "Nack", "Extend"):
        assert schemas[name]["not"] == {"required": ["lease", "leases"]}
        assert "lease" not in schemas[name].get("required", [])
