"""``--launcher kubernetes --render``: a manifest for a job of one pod a host. Nothing is started.

    job        an indexed Job and a headless Service of the same name; each pod runs its part of the job:
               shardwise launch --num_nodes N --node_rank $(JOB_COMPLETION_INDEX) --master_addr NAME-0.NAME ...
    trainjob   Kubeflow's TrainJob, whose pods run torchrun; its runtime sets the variables that torchrun reads

    --launcher_args "--image IMAGE --name NAME --kind job|trainjob --device nvidia.com/gpu --shm 8Gi --runtime NAME"

The job's secret and the variables of ``--export`` come from a Secret NAME that the user makes; the manifest holds their
names alone. Ranks of one pod share memory through ``/dev/shm``, which is a volume in memory here. A pod that fails is
started again and goes on from the last checkpoint. The namespace is the one to which the manifest is applied.
"""

import argparse
import re
from collections.abc import Sequence
from typing import Any

import yaml

from shardwise.base.errors import UsageError
from shardwise.launch.backends.protocol import LauncherArguments
from shardwise.launch.environment import SECRET
from shardwise.launch.hosts import Host

_GRACE_S = 120
"""Seconds between SIGTERM and SIGKILL of a pod, for its ranks to save."""
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")
_ELASTIC_RUNTIME = "torch-distributed"
Manifest = dict[str, Any]


def manifest_options(words: Sequence[str]) -> argparse.Namespace:
    """Return the options in ``--launcher_args``.

    Raises:
        UsageError: if a word is unknown or a value is none that Kubernetes takes.
    """
    parser = LauncherArguments()
    parser.add_argument("--image", default="shardwise")
    parser.add_argument("--name", default="shardwise")
    parser.add_argument("--kind", choices=["job", "trainjob"], default="job")
    parser.add_argument("--device", default="")
    parser.add_argument("--shm", default="8Gi")
    parser.add_argument("--runtime", default=_ELASTIC_RUNTIME)
    found = parser.parse_args(list(words))
    if not _NAME.fullmatch(found.name):
        raise UsageError(
            f"launch: --launcher_args: --name {found.name!r}: expected small letters, digits and dashes, at most 42"
        )
    return found


def manifest(
    hosts: Sequence[Host],
    command: Sequence[str],
    exports: Sequence[str],
    options: argparse.Namespace,
    port: int,
) -> str:
    """Return the manifest of a job as YAML.

    Args:
        hosts: One entry a pod; all have the same number of slots.
        command: Words of the program, as after the options of ``shardwise launch``, or of torchrun for a TrainJob.
        exports: Names of the variables that every rank gets from the Secret.
        options: Result of :func:`manifest_options`.
        port: Port of the store.

    Raises:
        UsageError: if the hosts have different numbers of slots.
    """
    ranks = {len(host.slots) for host in hosts}
    if len(ranks) != 1:
        raise UsageError(
            "launch: pods of one job have the same number of ranks; give --num_nodes and --ranks"
        )
    count = ranks.pop()
    made = _train_job if options.kind == "trainjob" else _job
    documents = made(len(hosts), count, command, _variables(exports, options.name), options, port)
    keys = [
        "--from-literal=secret=$(openssl rand -hex 32)",
        *(f'--from-literal={name}="${name}"' for name in exports),
    ]
    head = f"# kubectl create secret generic {options.name} {' '.join(keys)}\n"
    return head + yaml.safe_dump_all(documents, sort_keys=False, width=1000)


def _variables(exports: Sequence[str], name: str) -> list[Manifest]:
    keys = {SECRET: "secret"} | {each: each for each in exports}
    return [
        {"name": each, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
        for each, key in keys.items()
    ]


def _literal(words: Sequence[str]) -> list[str]:
    """Return words in which Kubernetes expands no variable."""
    return [word.replace("$", "$$") for word in words]


def _resources(options: argparse.Namespace, ranks: int) -> Manifest:
    return {"resources": {"limits": {options.device: ranks}}} if options.device else {}


def _shared_memory(options: argparse.Namespace) -> Manifest:
    return {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}}


def _job(
    nodes: int,
    ranks: int,
    command: Sequence[str],
    variables: list[Manifest],
    options: argparse.Namespace,
    port: int,
) -> list[Manifest]:
    name = options.name
    place = ["--ranks", str(ranks)]
    if nodes > 1:
        place += ["--num_nodes", str(nodes), "--node_rank", "$(JOB_COMPLETION_INDEX)"]
        place += ["--master_addr", f"{name}-0.{name}", "--master_port", str(port)]
    first, *rest = command
    container = {
        "name": "ranks",
        "image": options.image,
        "command": ["shardwise"],
        "args": [first, *place, *_literal(rest)],
        "env": variables,
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        **_resources(options, ranks),
    }
    pod = {
        "subdomain": name,
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": _GRACE_S,
        "containers": [container],
        "volumes": [_shared_memory(options)],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        # A pod's name must resolve before the pod is ready, because pods wait for one another.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completions": nodes,
            "parallelism": nodes,
            "completionMode": "Indexed",
            "template": {"spec": pod},
        },
    }
    return [service, job]


def _train_job(
    nodes: int,
    ranks: int,
    command: Sequence[str],
    variables: list[Manifest],
    options: argparse.Namespace,
    port: int,
) -> list[Manifest]:
    trainer = {
        "image": options.image,
        "numNodes": nodes,
        "numProcPerNode": ranks,
        "command": ["torchrun"],
        "args": _literal(command),
        "env": [*variables, {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"}],
    }
    if options.device:
        trainer["resourcesPerNode"] = {"limits": {options.device: ranks}}
    mount = {"name": "node", "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}
    override = {
        "targetJobs": [{"name": "node"}],
        "spec": {"volumes": [_shared_memory(options)], "containers": [mount]},
    }
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": options.name},
            "spec": {
                "runtimeRef": {"name": options.runtime},
                "trainer": trainer,
                "podTemplateOverrides": [override],
            },
        }
    ]
