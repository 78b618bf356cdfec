"""The manifests of docker/kubernetes/ray: their pods, and what they say to `inferpool place`.

The schemas of KubeRay's own fields are not here: they were used once, by hand (docs/ray.md).
"""

import shlex
from importlib.metadata import version
from typing import Any

import kubernetes_validate
import pytest
import yaml

from inferpool.service.cli.main import INFERPOOL
from inferpool.service.tools.place.plan import PlacePlan, plan_of
from tests.e2e.running import ROOT

FOLDER = ROOT / "docker" / "kubernetes"


def objects_of(path: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((FOLDER / path).read_text()) if each]


(CLUSTER,) = objects_of("ray/cluster.yaml")
(JOB,) = objects_of("ray/place.yaml")
FRONT_END = objects_of("hosts/front-end.yaml")
HEAD = CLUSTER["spec"]["headGroupSpec"]
(WORKERS,) = CLUSTER["spec"]["workerGroupSpecs"]


def container_of(group: dict[str, Any]) -> dict[str, Any]:
    (container,) = group["template"]["spec"]["containers"]
    return dict(container)


def variables_of(group: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container_of(group)["env"]}


def plan() -> PlacePlan:
    _, verb, *line = shlex.split(JOB["spec"]["entrypoint"])
    parser, _ = INFERPOOL.make_parser(verb)
    return plan_of(parser.parse_args([verb, *line]), {"INFERPOOL_CLUSTER_KEYS": "k" * 16})


@pytest.mark.parametrize("group", [HEAD, WORKERS], ids=["head", "workers"])
def test_kubernetes_accepts_the_pods(group: dict[str, Any]):
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x", **group["template"].get("metadata", {})},
        "spec": group["template"]["spec"],
    }
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    assert container_of(group)["image"] == "inferpool:ray", "one image, so one version of all"


def test_every_part_names_the_same_version_of_ray():
    assert CLUSTER["spec"]["rayVersion"] == version("ray")
    assert f"FROM rayproject/ray:{version('ray')}-" in (FOLDER / "ray" / "Dockerfile").read_text()


def test_the_job_runs_where_the_cluster_is_and_is_given_the_keys_of_the_hosts():
    assert JOB["spec"]["clusterSelector"]["ray.io/cluster"] == CLUSTER["metadata"]["name"]
    (key,) = [each["valueFrom"] for each in container_of(HEAD)["env"] if "valueFrom" in each]
    (secret,) = objects_of("hosts/key.example.yaml")
    assert key["secretKeyRef"]["name"] == secret["metadata"]["name"]
    assert key["secretKeyRef"]["key"] in secret["stringData"]
    assert list(plan().environ) == ["INFERPOOL_CLUSTER_KEYS"]


def test_agents_and_place_find_the_front_end_and_are_let_in():
    services = {each["metadata"]["name"]: each for each in FRONT_END if each["kind"] == "Service"}
    join = plan().arguments[plan().arguments.index("--join") + 1]
    name, _, port = join.partition(":")
    assert int(port) in [each["port"] for each in services[name]["spec"]["ports"]]
    assert plan().front_end.removeprefix("http://") in services
    (policy,) = [each for each in FRONT_END if each["kind"] == "NetworkPolicy"]
    (let_in,) = [each["from"] for each in policy["spec"]["ingress"] if "from" in each]
    labels = WORKERS["template"]["metadata"]["labels"]
    assert let_in[0]["podSelector"]["matchLabels"].items() <= labels.items()


def test_what_is_asked_for_is_one_whole_pod_so_that_each_host_is_one_more():
    limits = container_of(WORKERS)["resources"]["limits"]
    told = plan()
    assert (str(told.cpus_per_host), told.gpus_per_host) == (
        limits["cpu"],
        limits["nvidia.com/gpu"],
    )
    assert (told.min_hosts, told.max_hosts) == (WORKERS["minReplicas"], WORKERS["maxReplicas"])
    assert HEAD["rayStartParams"]["num-cpus"] == "0", "the head is no host"


def test_a_pod_that_ends_has_time_for_the_drain_of_its_agent():
    drain_s = float(variables_of(WORKERS)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert plan().drain_timeout_s < drain_s
    assert drain_s < WORKERS["template"]["spec"]["terminationGracePeriodSeconds"]
    assert variables_of(WORKERS)["RAY_worker_niceness"] == "0"
    for group in (HEAD, WORKERS):
        assert variables_of(group)["RAY_USAGE_STATS_ENABLED"] == "0"
