"""The files under cluster/ start the same idempotent command, and say what they must."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

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


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    subprocess.run(["shellcheck", str(CLUSTER / "slurm" / "sweep.sbatch")], check=True)


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


def test_what_the_ray_job_runs_is_a_valid_configuration():
    from sweeps.config import load

    job = yaml.safe_load((CLUSTER / "kuberay" / "rayjob.yaml").read_text())
    command = job["spec"]["entrypoint"].split()
    assert command[:4] == ["python", "-m", "sweeps", "run"]
    config = load(command[4:])
    assert config.cluster.address == "auto" and config.cluster.num_gpus == 1 and config.run.dir.startswith("/runs/")
