"""What deploy/ says, by the schemas of Kubernetes, by our own flags, and by itself. No cluster has
seen it.
"""

import math
import re
import shlex
import subprocess
import tomllib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from smg.launch_router import parse_router_args

from jaxserve.cli.field_flags import options_from
from jaxserve.generate.flags import parser as generate_parser
from jaxserve.server.disaggregation import roles
from jaxserve.server.disaggregation.addresses import read_addresses
from jaxserve.server.disaggregation.flags import RoleOptions, disaggregation
from jaxserve.server.flags import parser as serve_parser
from jaxserve.server.grpc import server as grpc_server
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.options import CredentialOptions

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path for path in (ROOT / "deploy").glob("*.yaml") if path.stem != "alerts"
)  # those are Prometheus's
KUBERNETES = (
    "1.34"  # the first in which a container may sleep before it is stopped without a feature gate
)
PARSERS = {"jaxserve.serve": serve_parser, "jaxserve.generate": generate_parser}
PORTS = {"grpc": 50051, "http": 8000}
# No package has the schema of a LeaderWorkerSet: the fields of its v1, from sigs.k8s.io/lws.
SET_FIELDS = {
    "replicas",
    "leaderWorkerTemplate",
    "rolloutStrategy",
    "startupPolicy",
    "networkConfig",
}
TEMPLATE_FIELDS = {
    *("leaderTemplate", "workerTemplate", "size", "restartPolicy", "subGroupPolicy"),
    *("volumeClaimTemplates", "persistentVolumeClaimRetentionPolicy"),
}
TEMPLATES = {
    "Deployment": lambda spec: [(spec["template"], 1)],  # each replica is a server of its own
    "StatefulSet": lambda spec: [(spec["template"], 1)],
    "LeaderWorkerSet": lambda spec: [
        (spec["leaderWorkerTemplate"]["leaderTemplate"], 1),
        (spec["leaderWorkerTemplate"]["workerTemplate"], spec["leaderWorkerTemplate"]["size"] - 1),
    ],
    "JobSet": lambda spec: [
        (job["template"]["spec"]["template"], job["template"]["spec"]["parallelism"])
        for job in spec["replicatedJobs"]
    ],
}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def group_of(document: dict[str, Any]) -> list[tuple[dict[str, Any], int]]:
    """Pod templates that run this project as one server, or one batch, and how many pods each makes
    of it.
    """
    pairs = TEMPLATES.get(document["kind"], lambda _: [])(document.get("spec"))
    return [
        pair for pair in pairs if the_container(pair[0])["image"].startswith("REGISTRY/jaxserve:")
    ]


def templates(path: Path) -> list[tuple[dict[str, Any], int]]:
    """Those of all groups in a file."""
    return [pair for document in documents(path) for pair in group_of(document)]


def groups() -> Iterator[Any]:
    for path in FILES:
        for document in documents(path):
            if group := group_of(document):
                yield pytest.param(group, id=f"{path.stem}-{document['metadata']['name']}")


def containers() -> Iterator[Any]:
    for path in FILES:
        for number, (template, _) in enumerate(templates(path)):
            yield pytest.param(template, id=f"{path.stem}-{number}")


def the_container(template: dict[str, Any]) -> dict[str, Any]:
    (found,) = template["spec"]["containers"]
    return found


def flags(template: dict[str, Any]) -> tuple[str, Namespace]:
    """The program, and its flags as it understands them; SystemExit when it does not."""
    arguments = the_container(template)["args"]
    return arguments[0], PARSERS[arguments[0]]().parse_args(arguments[1:])


def chips(template: dict[str, Any]) -> int:
    limits = the_container(template)["resources"]["limits"]
    return int(limits.get("google.com/tpu") or limits["nvidia.com/gpu"])


def test_there_is_what_was_promised() -> None:
    kinds = {path.stem: {document["kind"] for document in documents(path)} for path in FILES}
    assert kinds == {
        "disaggregated-v6e-8": {
            "StatefulSet",
            "Deployment",
            "Service",
            "ConfigMap",
            "NetworkPolicy",
        },
        "gpu-1": {"Deployment", "Service"},
        "gpu-8": {"Deployment", "Service"},
        "jobset-batch": {"JobSet"},
        "leaderworkerset-v5e-16": {"LeaderWorkerSet", "Service"},
        "leaderworkerset-v6e-8": {"LeaderWorkerSet", "Service"},
        "smg": {"StatefulSet", "Deployment", "Service", "NetworkPolicy"},
        "volumes": {"PersistentVolumeClaim"},
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_schemas(path: Path) -> None:
    for document in documents(path):
        match document["kind"]:
            case "LeaderWorkerSet":
                check_worker_set(document)
            case "JobSet":
                check_job_set(document)
            case _:
                kubernetes_validate.validate(document, KUBERNETES, strict=True)
    for template, _ in templates(path):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x"},
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_the_schemas_notice_a_misspelt_field() -> None:
    (deployment, _) = documents(ROOT / "deploy" / "gpu-1.yaml")
    the_container(deployment["spec"]["template"])["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES, strict=True)
    (job_set,) = documents(ROOT / "deploy" / "jobset-batch.yaml")
    job_set["spec"]["failurePolicy"]["maxRestart"] = 3
    with pytest.raises(AssertionError):
        check_job_set(job_set)


def check_worker_set(document: dict[str, Any]) -> None:
    assert document["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
    group = document["spec"]["leaderWorkerTemplate"]
    assert document["spec"].keys() <= SET_FIELDS and group.keys() <= TEMPLATE_FIELDS
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart", "no host outlives another"
    assert all(
        template.keys() <= {"metadata", "spec"}
        for template in (group["leaderTemplate"], group["workerTemplate"])
    )


def check_job_set(document: dict[str, Any]) -> None:
    """The model drops fields that it does not know: what comes back has to be what went in."""
    assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    model = JobsetV1alpha2JobSet.from_dict(document)
    assert model is not None

    def lost(given: Any, kept: Any, where: str) -> Iterator[str]:
        if isinstance(given, dict):
            for key, value in given.items():
                if key not in kept:
                    yield f"{where}.{key}"
                else:
                    yield from lost(value, kept[key], f"{where}.{key}")
        elif isinstance(given, list):
            for one, other in zip(given, kept, strict=True):
                yield from lost(one, other, where)

    assert not list(lost(document["spec"], model.to_dict()["spec"], "spec"))


@pytest.mark.parametrize("template", list(containers()))
def test_flags_are_ours(template: dict[str, Any]) -> None:
    program, args = flags(template)
    assert args.compilation_cache and args.model
    if program == "jaxserve.serve":
        assert args.host == "0.0.0.0"
        assert args.token_file or args.vllm_port, (
            "who listens on all addresses asks for a token: see test_smg_*"
        )


@pytest.mark.parametrize("group", list(groups()))
def test_the_mesh_takes_every_chip(group: list[tuple[dict[str, Any], int]]) -> None:
    """And tensor parallelism stays inside a host."""
    args = [flags(template)[1] for template, _ in group]
    assert len({str(vars(a)) for a in args}) == 1, "the same flags on all hosts"
    hosts, chips_of_host = (
        sum(count for _, count in group),
        {chips(template) for template, _ in group},
    )
    assert len(chips_of_host) == 1
    assert args[0].data * args[0].tensor == hosts * sum(chips_of_host) and args[0].tensor <= max(
        chips_of_host
    )
    assert args[0].pod == (hosts > 1)
    for template, _ in group:
        if (
            topology := template["spec"]
            .get("nodeSelector", {})
            .get("cloud.google.com/gke-tpu-topology")
        ):
            assert math.prod(map(int, topology.split("x"))) == hosts * chips(template)


@pytest.mark.parametrize("template", list(containers()))
def test_probes_ask_what_is_answered(template: dict[str, Any]) -> None:
    program, args = flags(template)
    container = the_container(template)
    follower = template.get("metadata", {}).get("labels", {}).get("role") == "follower"
    names = ("startupProbe", "readinessProbe", "livenessProbe")
    if program == "jaxserve.generate":
        assert not container.keys() & set(names)
        return
    probes = {name: container[name]["grpc"] for name in names if "grpc" in container[name]}
    if not follower:  # which has no HTTP
        alive = container["livenessProbe"]["httpGet"]
        assert alive == {"path": "/health", "port": args.http_port}
    assert all(probe["port"] == args.port == PORTS["grpc"] for probe in probes.values())
    ports = {"grpc": args.port, "http": args.http_port} | (
        {"vllm": args.vllm_port} if args.vllm_port else {}
    )
    assert {p["name"]: p["containerPort"] for p in container["ports"]} == ports
    assert not args.tls_cert, "Kubernetes asks over gRPC without TLS"
    ready = None if follower else roles.PREFILL if args.role == "prefill" else grpc_server.INFERENCE
    services = {name: probe.get("service") for name, probe in probes.items()}
    alive = {"livenessProbe": None} if follower else {}
    assert services == {"startupProbe": ready, "readinessProbe": ready, **alive}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > args.join_timeout


@pytest.mark.parametrize("template", list(containers()))
def test_there_is_time_to_drain(template: dict[str, Any]) -> None:
    program, args = flags(template)
    if program == "jaxserve.serve":
        before = the_container(template)["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert template["spec"]["terminationGracePeriodSeconds"] >= before + args.drain_timeout + 20


@pytest.mark.parametrize("template", list(containers()))
def test_what_is_mounted_is_there(template: dict[str, Any]) -> None:
    _, args = flags(template)
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    mounts = {mount["name"]: mount for mount in the_container(template)["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    claims = {
        document["metadata"]["name"] for document in documents(ROOT / "deploy" / "volumes.yaml")
    }
    used = {
        v["persistentVolumeClaim"]["claimName"]
        for v in volumes.values()
        if "persistentVolumeClaim" in v
    }
    assert used <= claims
    files = ("token_file", "prefill_token_file", "prefill_servers_file", "batch_file", "output")
    paths = [args.model, args.compilation_cache, *(getattr(args, name, None) for name in files)]
    written = [args.compilation_cache, *(getattr(args, name, None) for name in files[-2:])]
    for path in filter(None, paths):
        (mount,) = [m for m in mounts.values() if path.is_relative_to(m["mountPath"])]
        assert mount.get("readOnly", False) == (path not in written)


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem != "smg"], ids=lambda path: path.stem
)
def test_services_find_who_answers(path: Path) -> None:
    services = [document["spec"] for document in documents(path) if document["kind"] == "Service"]
    for service in (service for service in services if service.get("clusterIP") != "None"):
        labels = [template["metadata"]["labels"] for template, _ in templates(path)]
        found = [own for own in labels if service["selector"].items() <= own.items()]
        assert len(found) == 1 and found[0].get("role") != "follower"
        assert {port["targetPort"]: port["port"] for port in service["ports"]} == PORTS


def by_name(file: str) -> dict[tuple[str, str], Any]:
    """What a file says, by kind and name."""
    found = documents(ROOT / "deploy" / file)
    return {
        (document["kind"], document["metadata"]["name"]): document.get("spec", document)
        for document in found
    }


def test_decode_servers_find_prefill_servers(tmp_path: Path) -> None:
    """By the names of their pods, in a file that changes without a restart."""
    found = by_name("disaggregated-v6e-8.yaml")
    prefill, decode = (
        found["StatefulSet", "jaxserve-prefill"],
        found["Deployment", "jaxserve-decode"],
    )
    names, (there, here) = (
        prefill["serviceName"],
        (flags(group["template"])[1] for group in (prefill, decode)),
    )
    service = found["Service", names]
    assert (
        service["clusterIP"] == "None" and service["selector"] == prefill["selector"]["matchLabels"]
    )
    assert [(p["port"], p["targetPort"]) for p in service["ports"]] == [(there.port, "grpc")]
    volumes = {volume["name"]: volume for volume in decode["template"]["spec"]["volumes"]}
    name, text = volumes["prefill-servers"]["configMap"]["name"], here.prefill_servers_file.name
    listed, token = tmp_path / "servers", tmp_path / "token"
    listed.write_text(found["ConfigMap", name]["data"][text])
    token.write_text("secret")
    assert read_addresses(listed) == [
        f"jaxserve-prefill-{i}.{names}:{there.port}" for i in range(prefill["replicas"])
    ]
    mounts = {mount["name"]: mount for mount in the_container(decode["template"])["volumeMounts"]}
    assert "subPath" not in mounts["prefill-servers"], "those are never changed"
    here.prefill_servers_file, here.prefill_token_file = listed, token
    plan = disaggregation(options_from(RoleOptions, here), CredentialOptions())
    assert plan and plan.token and not plan.prefills


def test_prefill_servers_take_prompts_of_decode_servers_alone() -> None:
    found = by_name("disaggregated-v6e-8.yaml")
    prefill, decode = (
        found["StatefulSet", "jaxserve-prefill"],
        found["Deployment", "jaxserve-decode"],
    )
    policy = found["NetworkPolicy", "jaxserve-prefill"]
    assert policy["podSelector"] == prefill["selector"] and policy["policyTypes"] == ["Ingress"]
    there, here = (flags(group["template"])[1] for group in (prefill, decode))
    who = [{"podSelector": decode["selector"]}]
    assert policy["ingress"] == [{"from": who, "ports": [{"port": there.port}]}]
    secrets = {
        group: {
            v["name"]: v["secret"]
            for v in found[group]["template"]["spec"]["volumes"]
            if "secret" in v
        }
        for group in (("StatefulSet", "jaxserve-prefill"), ("Deployment", "jaxserve-decode"))
    }
    (asked,), given = (set(map(str, of.values())) for of in secrets.values())
    assert asked in given and here.prefill_token_file == there.token_file != here.token_file
    assert (here.model, here.dtype, here.weights) == (there.model, there.dtype, there.weights)


def test_smg_is_sent_to_the_servers() -> None:
    found = by_name("smg.yaml")
    replicas, router = found["StatefulSet", "jaxserve-replicas"], found["Deployment", "smg"]
    names, service = replicas["serviceName"], found["Service", replicas["serviceName"]]
    port = flags(replicas["template"])[1].vllm_port
    assert (
        service["clusterIP"] == "None"
        and service["selector"] == replicas["selector"]["matchLabels"]
    )
    assert [(p["port"], p["targetPort"]) for p in service["ports"]] == [(port, "vllm")]
    container = the_container(router["template"])
    given = parse_router_args(container["args"])
    assert given.worker_urls == [
        f"grpc://jaxserve-replicas-{i}.{names}:{port}" for i in range(replicas["replicas"])
    ]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert (
        ports == {"http": given.port, "metrics": given.prometheus_port} and given.host == "0.0.0.0"
    )
    probes = {container[name]["httpGet"]["port"] for name in ("readinessProbe", "livenessProbe")}
    (own,) = found["Service", "smg"]["ports"]
    assert probes == {own["targetPort"]} == {"http"} and found["Service", "smg"]["selector"] == {
        "app": "smg"
    }
    version = container["image"].rpartition(":")[2]
    assert f"smg=={version} " in (ROOT / "deploy" / "Dockerfile.smg").read_text()
    assert (
        router["template"]["spec"]["terminationGracePeriodSeconds"]
        > given.shutdown_grace_period_secs
    )


def test_the_metrics_that_a_picker_reads_are_there() -> None:
    named = set(re.findall(r"jaxserve:\w+_\w+", (ROOT / "deploy" / "README.md").read_text()))
    assert len(named) == 3
    exposed = Metrics(lambda: 0).render().decode()
    assert all(f"# TYPE {name} gauge" in exposed for name in named)


def test_smg_alone_reaches_servers_that_ask_for_no_token() -> None:
    found = by_name("smg.yaml")
    replicas, router = found["StatefulSet", "jaxserve-replicas"], found["Deployment", "smg"]
    policy = found["NetworkPolicy", "jaxserve-replicas"]
    args = flags(replicas["template"])[1]
    assert (
        not args.token_file
        and policy["podSelector"] == replicas["selector"]
        and policy["policyTypes"] == ["Ingress"]
    )
    who = [{"podSelector": router["selector"]}]
    assert policy["ingress"] == [{"from": who, "ports": [{"port": args.vllm_port}]}]
    container = the_container(router["template"])
    (variable,) = container["env"]
    assert (
        f"--api-key=$({variable['name']})" in container["args"]
        and "secretKeyRef" in variable["valueFrom"]
    )


@pytest.mark.parametrize("name, extra", [("Dockerfile.tpu", "tpu"), ("Dockerfile.gpu", "cuda13")])
def test_images(name: str, extra: str) -> None:
    text = (ROOT / "deploy" / name).read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"[{extra},smg]" in text and {extra, "smg"} <= project["optional-dependencies"].keys()
    assert set(re.findall(r"^FROM python:(\S+)-slim", text, re.M)) == {
        project["requires-python"].removeprefix(">=")
    }
    assert 'ENTRYPOINT ["python", "-m"]' in text, "what the manifests' args begin with"


def test_the_script_for_tpu_vms() -> None:
    path = ROOT / "deploy" / "tpu-vm.sh"
    subprocess.run(["bash", "-n", path], check=True)
    (given,) = re.findall(r"^SERVE=\((.*?)\)$", path.read_text(), re.M | re.S)
    program, *arguments = shlex.split(given)
    args = PARSERS[program]().parse_args(arguments)
    assert args.pod and args.data * args.tensor == 16, "of its default, a v5e-16"
    timeout = re.search(r"--stop-timeout (\d+)", path.read_text())
    assert timeout and int(timeout[1]) >= args.drain_timeout + 20
    done = subprocess.run(
        ["bash", path], capture_output=True, text=True, check=False, env={"ZONE": "z", "IMAGE": "i"}
    )
    assert done.returncode == 2 and done.stderr.startswith("A TPU slice without Kubernetes")
