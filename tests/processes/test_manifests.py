"""The manifests for Kubernetes: their pods find each other, get SIGTERM in time, and come back when it makes sense."""

import socket
from pathlib import Path

import pytest
import yaml

from jshard import launch
from jshard.cli._arguments import TrainArgs, parse
from jshard.launch.addresses import roll_call_port
from jshard.launch.cluster import REQUEST, RESUME

ROOT = Path(__file__).parents[2]
JOBSET = yaml.safe_load((ROOT / "launch" / "train.yaml").read_text())
SERVICE, JOB = yaml.safe_load_all((ROOT / "launch" / "train-job.yaml").read_text())
(REPLICATED,) = JOBSET["spec"]["replicatedJobs"]
OF_JOBSET = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train-pods-0"}, **REPLICATED["template"]}
STEP = list(yaml.safe_load_all((ROOT / "benchmarks" / "cluster" / "step.yaml").read_text()))

jobs = pytest.mark.parametrize("job", [OF_JOBSET, JOB], ids=["jobset", "job"])


def pod_of(job):
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


@jobs
def test_sigterm_arrives_and_leaves_time_to_save(job):
    pod, container = pod_of(job)
    assert container["command"] == ["jshard", "train"]  # a shell would be process 1, and keep the signal
    args = parse(TrainArgs, container["args"], command="jshard train")
    assert args.resume and args.stop_deadline is not None
    assert args.stop_deadline + 20 < pod["terminationGracePeriodSeconds"]


@jobs
@pytest.mark.parametrize("index", [0, 3])
def test_the_pods_find_each_other(monkeypatch, job, index):
    pod, container = pod_of(job)
    # JobSet names jobs JOBSET-NAME-INDEX and its service like itself; Kubernetes names pods JOB-INDEX.
    subdomain = pod.get("subdomain", JOBSET["metadata"]["name"])
    domain = f"{subdomain}.default.svc.cluster.local"
    monkeypatch.setattr(socket, "getfqdn", lambda: f"{job['metadata']['name']}-{index}.{domain}")
    environ = {variable["name"]: variable["value"] for variable in container["env"]}
    environ |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(index)}
    found = launch.detect(environ)
    assert found is not None
    assert (found.process_id, found.num_processes) == (index, job["spec"]["completions"])
    assert found.host == f"{job['metadata']['name']}-0.{domain}"
    assert [port["containerPort"] for port in container["ports"]] == [found.port, roll_call_port(found)]


@jobs
def test_all_pods_are_there_at_once_and_restarts_are_those_that_make_sense(job):
    spec, (pod, container) = job["spec"], pod_of(job)
    assert spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"
    assert pod["restartPolicy"] == "Never"  # or podFailurePolicy is refused
    rules = {rule["action"]: rule for rule in spec["podFailurePolicy"]["rules"]}
    assert rules["FailJob"]["onExitCodes"]["values"] == [1, REQUEST]
    assert {rule["onExitCodes"]["containerName"] for rule in rules.values() if "onExitCodes" in rule} == {
        container["name"]
    }
    shm = [volume for volume in pod["volumes"] if volume.get("emptyDir") == {"medium": "Memory"}]
    assert {"name": shm[0]["name"], "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_the_jobset_restarts_all_pods_but_for_a_failure():
    # Checked by hand against JobSet's own schema (config/components/crd there), with no further field allowed.
    assert (JOBSET["apiVersion"], JOBSET["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = JOBSET["spec"]
    assert spec["failurePolicy"]["maxRestarts"] > 0
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert REPLICATED["replicas"] == 1 and OF_JOBSET["spec"]["backoffLimit"] == 0


def test_the_plain_job_has_the_same_pods_and_starts_each_again():
    (pod, _), (of_jobset, _) = pod_of(JOB), pod_of(OF_JOBSET)
    assert pod == {**of_jobset, "subdomain": SERVICE["metadata"]["name"]}
    assert SERVICE["spec"]["clusterIP"] == "None" and SERVICE["spec"]["publishNotReadyAddresses"] is True
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": JOB["metadata"]["name"]}
    rules = {rule["action"]: rule for rule in JOB["spec"]["podFailurePolicy"]["rules"]}
    assert next(iter(rules)) == "Ignore" and rules["Ignore"]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert rules["Count"]["onExitCodes"]["values"] == [RESUME]
    assert JOB["spec"]["backoffLimitPerIndex"] > 0 and JOB["spec"]["maxFailedIndexes"] == 0


@pytest.mark.parametrize("version", ["1.29", "1.33"])
@pytest.mark.parametrize(
    "document", [SERVICE, JOB, OF_JOBSET, *STEP], ids=lambda document: document["metadata"]["name"]
)
def test_the_schema_has_all_fields(document, version):
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate, as .ci/run does")
    validate.validate(document, version, strict=True)
    with_typo = document | {"spec": document["spec"] | {"parralelism": 2}}
    with pytest.raises(validate.ValidationError, match="parralelism"):
        validate.validate(with_typo, version, strict=True)
