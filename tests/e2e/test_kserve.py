"""The manifests of docker/kserve: their form, and the service that they start.

They were compared once, by hand, with KServe's own definitions (docs/open-inference.md); the rules
here are those for the fields that they use.
"""

import re
import socket
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import pytest
import yaml

from inferpool.service.settings.loader import load
from tests.e2e.running import ROOT, Running, running, until
from tests.ports import free_port

FOLDER = ROOT / "docker" / "kserve"
(RUNTIME,) = yaml.safe_load_all((FOLDER / "runtime.yaml").read_text())
SERVICES = list(yaml.safe_load_all((FOLDER / "services.yaml").read_text()))
(CONTAINER,) = RUNTIME["spec"]["containers"]
GRACE_S = 30
"""Seconds that a pod has to end, unless its InferenceService says otherwise."""


def table(required: str = "", **fields: Any) -> dict[str, Any]:
    """The schema of an object with these fields and no other."""
    return {
        "type": "object",
        "required": required.split(),
        "properties": fields,
        "additionalProperties": False,
    }


def rows(of: Any) -> dict[str, Any]:
    return {"type": "array", "items": of}


TEXT, NUMBER, ANYTHING = {"type": "string"}, {"type": "integer"}, {"type": "object"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
FORMAT = {"name": TEXT, "version": TEXT}
POD = dict.fromkeys(("env", "ports", "args"), rows({}))
# Source: config/crd/full of github.com/kserve/kserve at aaac4e29, serving.kserve.io_servingruntimes
# and serving.kserve.io_inferenceservices.
RUNTIME_SCHEMA = table(
    "containers",
    annotations=TEXTS,
    labels=TEXTS,
    containers=rows({**ANYTHING, "required": ["name"]}),
    volumes=rows({**ANYTHING, "required": ["name"]}),
    disabled={"type": "boolean"},
    multiModel={"type": "boolean"},
    protocolVersions=rows(TEXT),
    supportedModelFormats=rows(
        table("name", autoSelect={"type": "boolean"}, priority={**NUMBER, "minimum": 1}, **FORMAT)
    ),
)
SERVICE_SCHEMA = table(
    "predictor",
    predictor=table(
        minReplicas=NUMBER,
        maxReplicas=NUMBER,
        terminationGracePeriodSeconds=NUMBER,
        model=table(
            modelFormat=table("name", **FORMAT),
            runtime=TEXT,
            protocolVersion=TEXT,
            storageUri=TEXT,
            resources=ANYTHING,
            **POD,
        ),
    ),
)


def pod_of(service: dict[str, Any]) -> dict[str, Any]:
    """The container of a service, as KServe merges it from the runtime's and the model's own."""
    model = service["spec"]["predictor"]["model"]
    given = {each["name"]: each for each in (*CONTAINER["env"], *model.get("env", ()))}
    ports = model.get("ports", ())
    merged = {**CONTAINER, "env": list(given.values()), "ports": list(ports)}
    text = yaml.safe_dump(merged).replace("{{.Name}}", service["metadata"]["name"])
    assert "{{" not in text
    return dict(yaml.safe_load(text))


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    """The variables of a container, with the earlier ones put in where a later one names them."""
    found: dict[str, str] = {}
    for each in container["env"]:
        found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], each["value"])
    return found


PODS = [pod_of(service) for service in SERVICES]
NAMES = [service["metadata"]["name"] for service in SERVICES]


@pytest.mark.parametrize(
    ("kind", "version", "schema", "objects"),
    [
        ("ServingRuntime", "v1alpha1", RUNTIME_SCHEMA, [RUNTIME]),
        ("InferenceService", "v1beta1", SERVICE_SCHEMA, SERVICES),
    ],
)
def test_every_object_has_the_form_that_kserve_defines(
    kind: str, version: str, schema: Any, objects: Any
) -> None:
    for one in objects:
        assert (one["kind"], one["apiVersion"]) == (kind, f"serving.kserve.io/{version}")
        jsonschema_rs.validate(schema, one["spec"])
        with pytest.raises(jsonschema_rs.ValidationError):
            jsonschema_rs.validate(schema, {**one["spec"], "nonsense": 1})


@pytest.mark.parametrize("container", PODS, ids=NAMES)
def test_kubernetes_accepts_the_pods(container: dict[str, Any]) -> None:
    spec = {"containers": [container], "volumes": RUNTIME["spec"]["volumes"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    assert container["name"] == "kserve-container", "the name by which KServe finds it"
    assert {each["name"] for each in container["volumeMounts"]} == {
        each["name"] for each in spec["volumes"]
    }


@pytest.mark.parametrize("service", SERVICES, ids=NAMES)
def test_the_runtime_speaks_the_protocol_and_has_the_format_of_each_service(service: Any) -> None:
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert model["protocolVersion"] in RUNTIME["spec"]["protocolVersions"]
    formats = [each["name"] for each in RUNTIME["spec"]["supportedModelFormats"]]
    assert model["modelFormat"]["name"] in formats
    uri, source = model["storageUri"], environment_of(pod_of(service))["MODEL"]
    if uri.startswith("pvc://"):  # KServe mounts a folder of the volume at /mnt/models
        assert not Path(uri).suffix
    else:  # it downloads the file, or the folder, into /mnt/models
        assert source == f"/mnt/models/{Path(uri).name}"


@pytest.mark.parametrize("index", range(len(SERVICES)), ids=NAMES)
def test_variables_make_one_model_with_the_name_of_its_service(index: int, tmp_path: Any) -> None:
    container, name = PODS[index], NAMES[index]
    environment = environment_of(container)
    settings = load({}, environment, tmp_path).settings
    assert {each: model.source for each, model in settings.models.items()} == {
        name: environment["MODEL"]
    }
    assert settings.job_store == "none"
    assert settings.drain_timeout_s + settings.shutdown_delay_s <= GRACE_S - 10
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert {probe["port"] for probe in probes} == {settings.port}
    annotations = RUNTIME["spec"]["annotations"]
    assert annotations["prometheus.kserve.io/port"] == str(settings.port)
    assert {each["containerPort"] for each in container["ports"]} <= {settings.grpc_port}


def test_a_pod_is_ready_by_its_probes_and_answers_by_the_name_of_its_service() -> None:
    container = pod_of(SERVICES[0])
    name = NAMES[0]
    environment = environment_of(container) | {f"INFERPOOL_MODELS__{name}__SOURCE": "echo"}
    port = free_port()  # the one of the manifest may be in use here
    environment["INFERPOOL_GRPC_PORT"] = str(port)
    with running(*container["args"][1:], "--front-ends", "2", env=environment) as service:
        check_probes(service, container)
        path = f"/v1/models/{name}"
        assert service.get("/v1/models").json()["models"] == [name]
        assert service.get(path).json()["ready"] is True
        answer = service.post(f"{path}:predict", json={"instances": [1, "a"]})
        assert answer.json() == {"predictions": [1, "a"]}
        assert service.get("/").json() == {"status": "alive"}
        socket.create_connection(("127.0.0.1", port), 60).close()
        assert "/v1/models/{model}:predict" in service.get("/openapi.json").json()["paths"]


def check_probes(service: Running, container: dict[str, Any]) -> None:
    for kind in ("startup", "liveness", "readiness"):
        path = container[f"{kind}Probe"]["httpGet"]["path"]
        until(lambda path=path: service.get(path).status_code == 200)  # type: ignore[misc]  # its default
