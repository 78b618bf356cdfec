"""Forms, documents and paths of models' own, through several front ends, as clients send them."""

import json
from pathlib import Path

import pytest

from tests.e2e.running import running, until

KEY, ADMIN = "a-key-of-sixteen-characters", "another-key-of-many-characters"
JSON = {"content-type": "application/json", "x-api-key": KEY}


def test_clients_speak_to_each_model_as_it_says(tmp_path: Path):
    pytest.importorskip("multipart")
    settings = {
        "front_ends": 2,
        "job_store": str(tmp_path / "jobs"),
        "models": {
            "described": {"source": "tests.test_testing:Described", "max_batch_size": 1},
            "echo": {"source": "echo", "path": "/echo/back", "envelope": False},
        },
    }
    env = {"INFERPOOL_PREDICT_KEYS": KEY, "INFERPOOL_ADMIN_KEYS": ADMIN}
    with running(settings=settings, env=env) as service:
        for number in range(10):  # each a connection of its own, so that both fronts are asked
            document = {"number": number, "b64": {"b64": "AAAA"}}
            answer = service.post("/echo/back", json=document, headers=JSON)
            assert (answer.status_code, answer.json()) == (200, document)
            files = {"image": ("cat.jpg", b"abc" * number, "image/jpeg")}
            answer = service.post(
                "/describe?top=1",
                data={"numbers": f"[{number}]", "text": "hello"},
                files=files,
                headers={"x-api-key": KEY},
            )
            found = {"numbers": [number], "text": "hello", "image": ["cat.jpg", 3 * number]}
            assert answer.json() == {"predictions": [[found, {"top": 1}]]}
            later = JSON | {"prefer": "respond-async, wait=60"}
            answer = service.post("/echo/back", content=b'"later"', headers=later)
            assert (answer.status_code, answer.text) == (200, '"later"')
        assert service.post("/echo/back", json=1).status_code == 401
        assert service.post("/echo/backwards", json=1, headers=JSON).status_code == 404
        lines = b'{"b64": "AAAA"}\n"text"\n'
        of_lines = {"x-api-key": KEY, "content-type": "application/jsonl"}
        job = service.post("/jobs?model=echo", content=lines, headers=of_lines).json()["id"]
        service.get(f"/jobs/{job}?wait=60", headers=JSON)
        result = service.get(f"/jobs/{job}/result", headers=JSON)
        assert result.json() == {"predictions": [{"b64": "AAAA"}, "text"]}
        admin = {"x-api-key": ADMIN}
        taken = {"name": "other", "source": "echo", "path": "/echo/back"}
        answer = service.post("/admin/models", json=taken, headers=admin)
        assert answer.status_code == 409
        assert "is the path of the model echo too" in answer.json()["detail"]
        taken["path"] = "/metrics/mine"
        answer = service.post("/admin/models", json=taken, headers=admin)
        assert answer.status_code == 422
        assert "path of the service itself" in answer.json()["detail"]
        document = service.get("/openapi.json").json()
        described = document["paths"]["/echo/back"]["post"]
        assert described["security"]
        assert "$ref" not in json.dumps(described["requestBody"]["content"]["application/json"])
        refused = 'inferpool_requests_total{code="401",model="echo"} 1'
        # A busy front end may tell its counts later.
        until(lambda: refused in service.get("/metrics", headers=JSON).text)
