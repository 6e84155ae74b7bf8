"""The calls of the gateway: what they do, by which token."""

from __future__ import annotations

from harness.gateway import Gateway


def test_a_task_lives_over_http(gateway: Gateway) -> None:
    made = gateway.submit(biz_id=42, attribute={"reason": "unpaid"})
    print(made, gateway.told()[-2000:])
    assert made.status == 201
    job_id = made.body["job_id"]
    assert isinstance(job_id, str)
    shown = gateway.call("GET", f"/v1/tasks/{job_id}")
    assert shown.status == 200
    print(shown)
