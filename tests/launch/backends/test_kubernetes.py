"""Manifests for Kubernetes: their fields, no secret, and the container's command run with the manifest's variables."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.base.errors import UsageError
from shardwise.launch.backends.kubernetes import manifest, manifest_options
from shardwise.launch.hosts import Host

_HOSTS = [Host(f"host {number}", (0, 1)) for number in range(3)]


def made(options: str = "", hosts: list[Host] = _HOSTS, *words: str) -> tuple[str, list[dict[str, Any]]]:
    text = manifest(hosts, ["launch", *words], ["TOKEN"], manifest_options(options.split()), 29500)
    return text, list(yaml.safe_load_all(text))


def test_an_indexed_job_with_a_service_of_its_name() -> None:
    text, (service, job) = made(
        "--name gpt --image reg/sw:1 --device nvidia.com/gpu --shm 2Gi", _HOSTS, "t.py", "$(A) $B"
    )
    assert (service["kind"], service["spec"]["clusterIP"], service["metadata"]["name"]) == (
        "Service",
        "None",
        "gpt",
    )
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]} == {"job-name": "gpt"}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
    assert pod["subdomain"] == "gpt" and pod["volumes"][0]["emptyDir"] == {
        "medium": "Memory",
        "sizeLimit": "2Gi",
    }
    (container,) = pod["containers"]
    assert container["volumeMounts"][0]["mountPath"] == "/dev/shm" and container["image"] == "reg/sw:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert container["args"][-2:] == ["t.py", "$$(A) $$B"], "Kubernetes expands nothing of the user's"
    place = container["args"][:-2]
    assert place[:3] == ["launch", "--ranks", "2"] and place[place.index("--master_addr") + 1] == "gpt-0.gpt"
    assert place[place.index("--node_rank") + 1] == "$(JOB_COMPLETION_INDEX)"
    keys = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in container["env"]}
    assert keys == {
        "SHARDWISE_SECRET": {"name": "gpt", "key": "secret"},
        "TOKEN": {"name": "gpt", "key": "TOKEN"},
    }
    assert text.startswith(
        "# kubectl create secret generic gpt --from-literal=secret=$(openssl rand -hex 32) "
    )


def test_a_train_job_of_kubeflow() -> None:
    _, (job,) = made("--kind trainjob --runtime mine")
    trainer = job["spec"]["trainer"]
    assert (job["kind"], job["spec"]["runtimeRef"]) == ("TrainJob", {"name": "mine"})
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["command"]) == (3, 2, ["torchrun"])
    assert trainer["env"][-1] == {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--kind pod", "invalid choice: 'pod'"),
        ("--name A_b", "expected small letters"),
        ("--imag x", "unrecognized arguments: --imag x"),
    ],
)
def test_options_that_are_none(options: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        manifest_options(options.split())


def test_hosts_of_different_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="same number of ranks"):
        made("", [Host("a", (0,)), Host("b", (0, 1))])


def test_the_containers_command_runs(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(
        "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])"
    )
    _, (_, job) = made("", _HOSTS[:1], "t.py", "a b")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    assert command[0] == "shardwise"
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert sorted(done.stdout.splitlines()) == ["0 2 ['a b']", "[rank 1] 1 2 ['a b']"], done.stderr
