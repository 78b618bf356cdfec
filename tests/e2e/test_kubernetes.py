"""The manifests of docker/kubernetes, held against the schemas of Kubernetes and the service."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from inferpool.service.settings.loader import load

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker" / "kubernetes").glob("*.yaml"))
OBJECTS: list[dict[str, Any]] = [
    each for path in FILES for each in yaml.safe_load_all(path.read_text()) if each
]
DEPLOYMENTS = [each for each in OBJECTS if each["kind"] == "Deployment"]
PODS = [each["spec"]["template"] for each in DEPLOYMENTS]


def object_of(kind: str) -> dict[str, Any]:
    """The only one of its kind."""
    (one,) = [each for each in OBJECTS if each["kind"] == kind]
    return one


def name_of(one: dict[str, Any]) -> str:
    return f"{one['kind']}-{one['metadata']['name']}"


@pytest.mark.parametrize("version", ["1.29", "1.33", kubernetes_validate.latest_version()])
def test_every_manifest_is_what_kubernetes_takes(version):
    assert len(OBJECTS) >= 7
    for one in OBJECTS:
        kubernetes_validate.validate(one, version, strict=True)


def test_a_field_that_is_misspelt_would_be_noticed():
    wrong = {**DEPLOYMENTS[0], "spec": {**DEPLOYMENTS[0]["spec"], "replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.33", strict=True)


@pytest.mark.parametrize("pod", PODS, ids=[name_of(each) for each in DEPLOYMENTS])
def test_a_pod_is_probed_where_the_service_answers_and_ends_after_its_drain(pod, tmp_path):
    settings = load({}, object_of("ConfigMap")["data"], tmp_path).settings
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert [probe["path"] for probe in probes] == [*["/health/live"] * 2, "/health/ready"]
    assert {probe["port"] for probe in probes} == {container["ports"][0]["name"]}
    drain_s = settings.drain_timeout_s + settings.shutdown_delay_s
    assert spec["terminationGracePeriodSeconds"] >= drain_s + 15
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert mounts == {each["name"] for each in spec["volumes"]}
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_services_and_budgets_select_the_pods_of_both_kinds():
    selectors = [object_of("Service")["spec"]["selector"]]
    selectors += [object_of("PodDisruptionBudget")["spec"]["selector"]["matchLabels"]]
    for selector in selectors:
        assert all(selector.items() <= pod["metadata"]["labels"].items() for pod in PODS)
    scaled = object_of("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"]
    assert scaled in [each["metadata"]["name"] for each in DEPLOYMENTS]


def test_keys_of_the_secret_reach_the_service_under_the_names_of_its_settings(tmp_path):
    secret = object_of("Secret")
    for pod in PODS:
        environ = {
            each["name"]: secret["stringData"][each["valueFrom"]["secretKeyRef"]["key"]]
            for each in pod["spec"]["containers"][0]["env"]
        }
        settings = load({}, environ, tmp_path).settings
        assert settings.predict_keys
        assert settings.metrics_keys
        assert settings.admin_keys


def test_yaml_is_tidy():
    command = [sys.executable, "-m", "yamllint", "--strict", "compose.yaml", "docker"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
