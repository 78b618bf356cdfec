"""Two API keys on a service as a user starts it: one floods, and the other still gets answers."""

import pytest

from tests.e2e.running import asking, running, until

FLOODER, QUIET = "a-key-that-floods", "a-key-that-is-quiet"
SETTINGS = {
    "front_ends": 2,
    "max_queue_length": 8,
    "max_body_bytes": 100_000,
    "models": {
        "slow": {
            "source": "echo", "replicas": 1, "max_batch_size": 1, "credit": 1,
            "options": {"delay_s": 0.05},
        }
    },
}  # fmt: skip


@pytest.mark.slow
def test_a_key_that_floods_is_refused_and_the_other_is_answered():
    keys = {"INFERPOOL_PREDICT_KEYS": f"{FLOODER},{QUIET}"}
    metrics = {"headers": {"x-api-key": QUIET}}

    def rejected(reason: str) -> int:
        lines = service.get("/metrics", **metrics).text.splitlines()
        start = f'inferpool_rejected_total{{model="slow",reason="{reason}"}} '
        return round(sum(float(line[len(start) :]) for line in lines if line.startswith(start)))

    with running(settings=SETTINGS, env=keys) as service:

        def flood():
            return service.ask("x", headers={"x-api-key": FLOODER})

        with asking(flood, num_clients=16) as flooded:
            until(lambda: any(each.status_code == 429 for each in flooded))
            answers = [service.ask("x", headers={"x-api-key": QUIET}) for _ in range(5)]
        assert {each.status_code for each in answers} == {200}
        assert {each.status_code for each in flooded} == {200, 429}
        refusals = [each for each in flooded if each.status_code == 429]
        assert {each.json()["code"] for each in refusals} == {"over_share"}
        assert all(each.headers["retry-after"] >= "1" for each in refusals)
        assert "6 requests of this key that wait have its share" in refusals[0].json()["detail"]
        assert rejected("key_share") == len(refusals)
        assert rejected("queue_full") == 0
