"""The manifests of docker/kubernetes: their form, and that they fit the service."""

import subprocess
import sys
from typing import Any

import kubernetes_validate
import pytest
import yaml

from inferpool.service.settings.loader import load
from tests.e2e.running import ROOT

FOLDER = ROOT / "docker" / "kubernetes"
OBJECTS: list[dict[str, Any]] = [
    each
    for path in sorted(FOLDER.glob("*.yaml"))
    for each in yaml.safe_load_all(path.read_text())
    if each
]
DEPLOYMENTS = [each for each in OBJECTS if each["kind"] == "Deployment"]
PODS = [each["spec"]["template"] for each in DEPLOYMENTS]


def object_of(kind: str) -> dict[str, Any]:
    """Return the only object of a kind."""
    (one,) = [each for each in OBJECTS if each["kind"] == kind]
    return one


@pytest.mark.parametrize("version", ["1.29", "1.33", kubernetes_validate.latest_version()])
def test_kubernetes_accepts_every_manifest_and_no_unknown_field(version):
    assert len(OBJECTS) >= 7
    for one in OBJECTS:
        kubernetes_validate.validate(one, version, strict=True)
    wrong = {**DEPLOYMENTS[0], "spec": {**DEPLOYMENTS[0]["spec"], "replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("pod", PODS, ids=[each["metadata"]["name"] for each in DEPLOYMENTS])
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


def test_pods_that_share_no_store_keep_no_jobs_since_a_call_may_reach_any_of_them(tmp_path):
    settings = load({}, object_of("ConfigMap")["data"], tmp_path).settings
    assert settings.job_store == "none"
    assert all(each["spec"]["replicas"] > 1 for each in DEPLOYMENTS)


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
        assert environ["PGPASSWORD"] == secret["stringData"]["job_store_password"]
        settings = load({}, environ, tmp_path).settings
        assert settings.predict_keys
        assert settings.metrics_keys
        assert settings.admin_keys


def test_yaml_is_tidy():
    command = [sys.executable, "-m", "yamllint", "--strict", "compose.yaml", "docker"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
