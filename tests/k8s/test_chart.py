"""The Helm chart: what it renders is valid, runs what is here, and wrong values are refused."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml

from cluster.config.load import load_config
from cluster.config.model import Config
from tests.cluster.gateway.test_observability_page import everything
from tests.k8s.chart import CHART, EXAMPLES, ROOT, Object, check, helm, render
from workers.process.mutual_tls import NAME


@pytest.fixture(scope="module", params=EXAMPLES, ids=lambda path: path.stem)
def rendered(request: pytest.FixtureRequest) -> list[Object]:
    """The objects of an example."""
    return render("--values", request.param)


MODELS_OF_70B = ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct")


def one(objects: list[Object], kind: str) -> Object:
    (found,) = (each for each in objects if each["kind"] == kind)
    return found


def pods(objects: list[Object]) -> list[Object]:
    """All pod templates and pods."""

    def inside(value: Any) -> list[Object]:
        if isinstance(value, list):
            return [pod for each in value for pod in inside(each)]
        if not isinstance(value, dict):
            return []
        own = [value] if "containers" in value.get("spec", {}) else []
        return own + [pod for each in value.values() for pod in inside(each)]

    return inside(objects)


def test_the_chart_has_no_fault_that_helm_knows() -> None:
    done = helm("lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_objects_are_valid(rendered: list[Object]) -> None:
    for found in rendered:
        check(found)


@pytest.mark.parametrize("where", ["head", "worker"])
def test_the_check_refuses_a_wrong_field_of_a_pod(where: str) -> None:
    found = one(render(), "RayService")
    cluster = found["spec"]["rayClusterConfig"]
    group = cluster["headGroupSpec"] if where == "head" else cluster["workerGroupSpecs"][0]
    group["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(jsonschema.ValidationError, match="imagePullPolice"):
        check(found)


def test_the_check_refuses_a_wrong_field_of_a_plain_object() -> None:
    found = one(render(), "NetworkPolicy")
    found["spec"]["ingres"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        check(found)


def test_the_configuration_is_one_that_the_server_reads(
    rendered: list[Object], tmp_path: Path
) -> None:
    maps = [each for each in rendered if each["kind"] == "ConfigMap"]
    (text,) = (each["data"]["paceline.toml"] for each in maps if "paceline.toml" in each["data"])
    path = tmp_path / "paceline.toml"
    path.write_text(text)
    config = load_config(path, {})
    assert config.server.host == "0.0.0.0"
    models = [config.target.model, *(each.model for each in config.drafters if each.model)]
    assert not [model for model in models if model.startswith("/")], "no step fills a folder"


def test_no_value_is_missing(rendered: list[Object]) -> None:
    """Go writes "<nil>" where a group of workers leaves out a key that only our defaults have."""
    assert "<nil>" not in json.dumps(rendered)


def test_every_key_of_the_configuration_is_a_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["properties"]["config"]["properties"]
    assert set(known) == set(Config.model_fields) - {"plan"}
    for table in ("target", "pool", "speculation", "server", "workers"):
        fields = Config.model_fields[table].annotation
        assert fields is not None
        assert set(known[table]["properties"]) == set(fields.model_fields), table
    (drafter,) = (known["drafters"]["items"],)
    assert "kind" in drafter["properties"]


def test_every_schema_of_an_object_of_ours_is_closed() -> None:
    """A key with a typo is refused, except inside what Kubernetes itself defines."""

    def walk(schema: Any, path: str) -> None:
        if isinstance(schema, dict):
            if "properties" in schema:
                assert schema["additionalProperties"] is False, path
            for key, value in schema.items():
                walk(value, f"{path}.{key}")

    walk(json.loads((CHART / "values.schema.json").read_text()), "")


def test_pods_run_without_rights(rendered: list[Object]) -> None:
    found = pods(rendered)
    assert found
    for pod in found:
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert set(container["resources"]) == {"limits", "requests"}
            named = {volume["name"] for volume in spec.get("volumes", ())}
            assert {each["name"] for each in container.get("volumeMounts", ())} <= named


def test_pods_are_found_by_the_objects_that_select_them(rendered: list[Object]) -> None:
    labels = [pod["metadata"]["labels"] for pod in pods(rendered)]
    for found in rendered:
        selector = found["spec"].get("selector") if "spec" in found else None
        if found["kind"] in ("PodDisruptionBudget", "NetworkPolicy"):
            wanted = (selector or found["spec"]["podSelector"])["matchLabels"].items()
            assert any(wanted <= each.items() for each in labels), found["metadata"]["name"]


def test_what_is_run_is_here(rendered: list[Object]) -> None:
    """The import path of the Serve application, and the commands of jobs with their flags."""
    for found in rendered:
        if found["kind"] == "RayService":
            serve = yaml.safe_load(found["spec"]["serveConfigV2"])
            (application,) = serve["applications"]
            module, _, name = application["import_path"].partition(":")
            assert name in (ROOT / f"{module.replace('.', '/')}.py").read_text().split()
        if found["kind"] == "Deployment":
            (container,) = found["spec"]["template"]["spec"]["containers"]
            python, *arguments = container["command"]
            assert (python, arguments[0]) == ("python", "-m")
            _assert_takes(arguments)
        if found["kind"] == "RayJob":
            command, *arguments = shlex.split(found["spec"]["entrypoint"])
            assert (command, arguments[0]) == ("python", "-m")
            _assert_takes(arguments)


def _assert_takes(arguments: Sequence[str]) -> None:
    """`-m MODULE` has all flags among the arguments."""
    command = (sys.executable, *arguments[:2], "--help")
    asked = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert asked.returncode == 0
    assert {one for one in arguments[2:] if one.startswith("--")} <= set(asked.stdout.split())


def test_a_release_may_use_the_drafters_of_another() -> None:
    pool = render("--values", CHART / "examples/drafter-pool.yaml", release="drafters")
    service, (pod,) = one(pool, "Service"), pods([one(pool, "Deployment")])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    address = f"{service['metadata']['name']}:{port['port']}"
    user = render("--set-json", f'config.pool={{"addresses": ["{address}"]}}')
    (to,) = [
        each["to"][0]["podSelector"]["matchLabels"]
        for each in one(user, "NetworkPolicy")["spec"]["egress"]
        if {"port": 9002, "protocol": "TCP"} in each.get("ports", ())
    ]
    assert to.items() <= pod["metadata"]["labels"].items()
    (allowed,) = [
        each["from"]
        for each in one(pool, "NetworkPolicy")["spec"]["ingress"]
        if {"port": 9002, "protocol": "TCP"} in each.get("ports", ())
    ]
    (gateway, *_) = pods([one(user, "RayService")])
    for each in allowed:
        selected = each["podSelector"]["matchLabels"]
        assert selected.items() <= gateway["metadata"]["labels"].items()


def test_a_vllm_of_ones_own_may_use_them() -> None:
    """The example's pods are let in and find the pool; without the value they are not let in."""
    vllm = yaml.safe_load((ROOT / "k8s/vllm.yaml").read_text())
    check(vllm)
    (pod,) = pods([vllm])
    labels = pod["metadata"]["labels"]
    (environment,) = (each["env"] for each in pod["spec"]["containers"])
    let_in = []
    for more in ((), ("--set", "drafterPool.clientLabels.app=vllm")):
        values = ("--values", CHART / "examples/drafter-pool.yaml", *more)
        pool = render(*values, release="drafters")
        service = one(pool, "Service")
        address = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
        assert {"name": "PACELINE_DRAFTERS", "value": address} in environment
        (allowed,) = [
            each["from"]
            for each in one(pool, "NetworkPolicy")["spec"]["ingress"]
            if {"port": 9002, "protocol": "TCP"} in each.get("ports", ())
        ]
        selectors = [each["podSelector"]["matchLabels"].items() for each in allowed]
        let_in.append(any(each <= labels.items() for each in selectors))
    assert let_in == [False, True]


def test_models_of_the_hub_are_fetched_where_they_stay(rendered: list[Object]) -> None:
    """And not into the folder of temporary files, which each pod has for itself."""
    for pod in pods(rendered):
        for container in pod["spec"]["containers"]:
            environment = {each["name"]: each.get("value") for each in container.get("env", ())}
            if "PACELINE_HOME" in environment:
                (mount,) = [
                    each["mountPath"]
                    for each in container["volumeMounts"]
                    if each["name"] == "models"
                ]
                assert environment["PACELINE_HOME"] == mount
                assert environment["HF_HOME"].startswith(f"{mount}/")


def replicas() -> dict[str, Object]:
    """The objects of k8s/replicas.yaml by their kinds."""
    found = yaml.safe_load_all((ROOT / "k8s/replicas.yaml").read_text())
    return {each["kind"]: each for each in found}


def test_keda_scales_pods_that_are_ready_once_they_serve() -> None:
    objects = replicas()
    scaler = objects.pop("ScaledObject")["spec"]  # Its schema is not here.
    for each in objects.values():
        check(each)
    deployment, service = objects["Deployment"], objects["Service"]
    assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"], "KEDA's number"
    assert scaler["minReplicaCount"] < scaler["maxReplicaCount"]
    spec, labels = (
        deployment["spec"]["template"]["spec"],
        pods([deployment])[0]["metadata"]["labels"],
    )
    assert service["spec"]["selector"].items() <= labels.items()
    scraped = objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert scraped.items() <= service["metadata"]["labels"].items()
    (container,) = spec["containers"]
    probes = {each: container[f"{each}Probe"] for each in ("startup", "readiness", "liveness")}
    paths = {each: probe["httpGet"]["path"] for each, probe in probes.items()}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    start_seconds = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
    assert start_seconds < deployment["spec"]["progressDeadlineSeconds"]
    scales = scaler["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert scales["scaleUp"]["policies"][0]["periodSeconds"] >= start_seconds
    program, verb, model, *flags = container["command"]
    drafter = next(each.partition("=")[2] for each in flags if each.startswith("--draft="))
    assert (program, verb, model, drafter) == ("paceline", "serve", *MODELS_OF_70B)
    (drain,) = [each.partition("=")[2] for each in flags if each.startswith("--drain=")]
    assert int(drain) < spec["terminationGracePeriodSeconds"]
    asked = subprocess.run(
        (sys.executable, "-m", "deploy.cli", "serve", "--help"),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert {each.partition("=")[0] for each in flags} <= set(re.findall(r"--[a-z-]+", asked.stdout))


def test_keda_asks_for_a_metric_that_is_there() -> None:
    (trigger,) = replicas()["ScaledObject"]["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    promql_parser.parse(query)
    (name,) = re.findall(r"paceline:\w+", query)
    assert everything().labels()[name] == {"model_name", "driver"}
    (kept,) = re.findall(r"by \(([^)]*)\)", query)
    assert kept == "pod, driver", "Prometheus' operator adds the pod"


def test_prometheus_scrapes_each_count_once() -> None:
    """Each replica tells the counts of all, so the proxy of one pod is asked."""
    monitor = one(render("--set", "monitoring.serviceMonitor=true"), "ServiceMonitor")
    (relabeling,) = monitor["spec"]["endpoints"][0]["relabelings"]
    assert (relabeling["action"], relabeling["regex"]) == ("keep", "head")
    assert relabeling["sourceLabels"] == ["__meta_kubernetes_pod_label_ray_io_node_type"]


def test_prometheus_shows_the_operators_key_where_there_are_keys() -> None:
    """A gateway with keys answers `/metrics` with 401 without one (tests/cluster/gateway)."""
    public = render("--values", CHART / "examples/public.yaml")
    (scraped,) = one(public, "ServiceMonitor")["spec"]["endpoints"]
    secret = scraped["authorization"]["credentials"]
    (*_, pod) = pods([one(public, "RayService")])
    (shown,) = [
        each["valueFrom"]["secretKeyRef"]
        for each in pod["spec"]["containers"][0]["env"]
        if each["name"] == "PACELINE_API_KEY"
    ]
    assert secret == shown, "the key with which gateways ask drivers"
    (open_to_all,) = one(render("--set", "monitoring.serviceMonitor=true"), "ServiceMonitor")[
        "spec"
    ]["endpoints"]
    assert "authorization" not in open_to_all


def test_an_autoscaler_owns_the_number_of_drafters() -> None:
    """A number in the Deployment would undo what it has chosen at each upgrade."""
    objects = render("--values", CHART / "examples/drafter-pool.yaml")
    scaler, drafters = one(objects, "HorizontalPodAutoscaler"), one(objects, "Deployment")
    assert scaler["spec"]["scaleTargetRef"]["name"] == drafters["metadata"]["name"]
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 6)
    assert "replicas" not in drafters["spec"]
    pool = "drafterPool.enabled=true,drafterPool.model=demo-draft,drafterPool.replicas=2"
    assert one(render("--set", pool), "Deployment")["spec"]["replicas"] == 2
    by_cpu = one(render("--set", f"{pool},drafterPool.autoscaling.maxReplicas=3"), scaler["kind"])
    check(by_cpu)
    too_few = helm("template", "r", CHART, "--set", f"{pool},drafterPool.autoscaling.maxReplicas=2")
    assert "expected 0, or more than drafterPool.replicas" in too_few.stderr
    assert by_cpu["spec"]["metrics"][0]["resource"]["name"] == "cpu"


SECURED = "tls.workers.issuer.name=own,tls.server.issuer.name=web,tls.server.names={a.example}"


def test_certificates_are_mounted_where_the_configuration_has_them(tmp_path: Path) -> None:
    objects = render("--set", SECURED)
    made = {each["spec"]["secretName"]: each for each in objects if each["kind"] == "Certificate"}
    for found in made.values():
        check(found)
    worker = made["r-workers-tls"]["spec"]
    assert worker["dnsNames"] == [NAME]
    assert {"server auth", "client auth"} <= set(worker["usages"])
    assert made["r-server-tls"]["spec"]["dnsNames"] == ["a.example"]
    path = tmp_path / "paceline.toml"
    path.write_text(one(objects, "ConfigMap")["data"]["paceline.toml"])
    config = load_config(path, {})
    service = one(objects, "RayService")
    for pod in pods([service]):
        spec = pod["spec"]
        secrets = {
            each["name"]: each.get("secret", {}).get("secretName") for each in spec["volumes"]
        }
        mounted = {
            each["mountPath"]: secrets[each["name"]]
            for each in spec["containers"][0]["volumeMounts"]
        }
        assert config.workers.tls is not None
        assert mounted[config.workers.tls] == "r-workers-tls"
        for file in (config.server.tls_cert, config.server.tls_key):
            assert file is not None
            assert mounted[str(Path(file).parent)] == "r-server-tls"


def test_an_existing_secret_needs_no_issuer() -> None:
    objects = render("--set", "tls.workers.existingSecret=mine")
    assert "Certificate" not in [each["kind"] for each in objects]
    [pod, *_] = pods([one(objects, "RayService")])
    assert "mine" in [each.get("secret", {}).get("secretName") for each in pod["spec"]["volumes"]]


def test_ray_asks_for_a_token_unless_it_is_turned_off() -> None:
    cluster = one(render(), "RayService")["spec"]["rayClusterConfig"]
    assert cluster["authOptions"]["mode"] == "token"
    own = one(render("--set", "ray.token.existingSecret=mine"), "RayService")
    assert own["spec"]["rayClusterConfig"]["authOptions"]["secretName"] == "mine"
    none = one(render("--set", "ray.token.enabled=false"), "RayService")
    assert "authOptions" not in none["spec"]["rayClusterConfig"]


WRONG = {
    "a key with a typo": ("workrs=1", "workrs"),
    "a key with a typo in a table": ("serving.enable=true", "enable"),
    "a number as text": ("serving.gateways=many", "gateways"),
    "no gateway": ("serving.gateways=0", "gateways"),
    "a storage that is not there": ("models.storage=s3", "storage"),
    "no worker": ("workers=null", "workers"),
    "a group with a bad name": ("workers[0].name=GPU_1", "name"),
    "a group without a name": ("workers[0].name=null", "name"),
    "a fraction of a GPU": ("workers[0].gpus=0.5", "gpus"),
    "a negative number": ("workers[0].replicas=-1", "replicas"),
    "memory in words": ("sharedMemory=two gigabytes", "sharedMemory"),
    "a limit in words": ("workers[0].resources.limits.memory=lots", "memory"),
    "a pull policy that is not there": ("image.pullPolicy=Sometimes", "pullPolicy"),
    "no image": ("image.repository=", "repository"),
    "a version of Ray without numbers": ("ray.version=newest", "version"),
    "Redis without a port": ("ray.redis.address=redis", "address"),
    "Redis in no namespace": ("ray.redis.namespace=a b", "namespace"),
    "a label with a blank": ("workers[0].labels.zone=a b", "zone"),
    "a label with an operator": ("workers[0].labels.zone=!a", "zone"),
    "a folder that is none": ("models.hostPath=models", "hostPath"),
    "a hub name with a blank": ("models.fetch[0]=a b", "fetch"),
    "a batch outside the volume": ("batch.input=/etc/passwd", "input"),
    "a batch that would run another command": ("batch.input=/data/x;rm", "input"),
    "a secret with a bad name": ("tls.workers.existingSecret=My_Secret", "existingSecret"),
    "an issuer that is none": ("tls.workers.issuer.kind=Authority", "kind"),
    "TLS of nobody": ("tls.worker.existingSecret=a", "worker"),
    "a key of the configuration with a typo": ("config.target.tensor_paralel=2", "tensor_paralel"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_refused_by_name(case: str) -> None:
    assignment, named = WRONG[case]
    done = helm("template", "r", CHART, "--set", assignment)
    assert done.returncode != 0
    assert named in done.stderr
    assert len(done.stderr) < 1000


INCOMPLETE = {
    "models.fetch[0]=demo": "models.storage",
    "models.storage=hostPath": "models.hostPath",
    "tls.server.existingSecret=a": "tls.workers",
    "tls.workers.existingSecret=a,tls.server.issuer.name=b": "tls.server.names",
    "ingress.enabled=true": "ingress.host",
    "gatewayApi.enabled=true": "gatewayApi.parents",
    "batch.enabled=true": "data.existingClaim",
    "batch.enabled=true,data.existingClaim=files": "batch.input",
    "serving.enabled=false": "serving, batch, development and drafterPool",
    "drafterPool.enabled=true": "drafterPool.model",
}


@pytest.mark.parametrize("assignment", INCOMPLETE)
def test_a_value_that_is_missing_is_named(assignment: str) -> None:
    done = helm("template", "r", CHART, "--set", assignment)
    assert done.returncode != 0
    assert INCOMPLETE[assignment] in done.stderr


def test_a_head_that_is_lost_is_waited_for_if_there_is_redis() -> None:
    """GCS fault tolerance, and nodes that do not end themselves before the head is back."""
    redis = "ray.redis.address=redis:6379,ray.redis.existingSecret=secret,ray.redis.namespace=mine"
    cluster = one(render("--set", redis), "RayService")["spec"]["rayClusterConfig"]
    assert cluster["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "secret", "key": "password"}}},
        "externalStorageNamespace": "mine",
    }
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        waits = {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "600"}
        assert waits in container["env"]
    assert "gcsFaultToleranceOptions" not in one(render(), "RayService")["spec"]["rayClusterConfig"]


def test_groups_of_workers_give_their_nodes_the_labels_that_the_configuration_asks_for() -> None:
    rendered = render("--values", CHART / "examples/two-hosts.yaml")
    groups = one(rendered, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert [(group["groupName"], group.get("labels")) for group in groups] == [
        ("target", None),
        ("drafters", {"pool": "drafters"}),
    ]


def test_the_chart_has_the_alerts_and_the_dashboard_of_deploy() -> None:
    """Helm reads no file outside the chart: `cp deploy/monitoring/* k8s/paceline/monitoring`."""
    copies = {path.name: path.read_text() for path in (CHART / "monitoring").iterdir()}
    assert copies == {
        path.name: path.read_text() for path in (ROOT / "deploy/monitoring").iterdir()
    }
    found = render("--set", "monitoring.prometheusRule=true,monitoring.grafanaDashboard=true")
    rules = one(found, "PrometheusRule")["spec"]["groups"][0]["rules"]
    assert all(rule["alert"].startswith("Paceline") for rule in rules)
    maps = [each["data"] for each in found if each["kind"] == "ConfigMap"]
    (dashboard,) = (each["paceline.json"] for each in maps if "paceline.json" in each)
    assert json.loads(dashboard) == json.loads(copies["dashboard.json"])
