"""From options of hosts to the hosts of a job."""

from pathlib import Path

import pytest

from shardwise.base.errors import ShardwiseError, UsageError
from shardwise.launch.hosts import Host
from shardwise.launch.starting import HostChoice, exported, place_of


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("gpu1 slots=4\ngpu2 slots=4\n")
    return path


def test_several_hosts_of_a_file_are_started_by_ssh(hostfile: Path) -> None:
    place = place_of(HostChoice(hostfile=hostfile), False)
    assert (
        place == ([Host("gpu1", (0, 1, 2, 3)), Host("gpu2", (0, 1, 2, 3))], True, "ssh") and place.world == 8
    )
    assert place_of(HostChoice(hostfile=hostfile, node_rank=1), False).launcher is None
    assert place_of(HostChoice(hostfile=hostfile, stays_here=True), False).launcher is None
    assert place_of(HostChoice(hostfile=hostfile, num_nodes=1), False).launcher is None
    assert place_of(HostChoice(hostfile=hostfile, num_nodes=1, leaves_here=True), False).launcher == "ssh"
    assert place_of(HostChoice(hostfile=hostfile, include="gpu2:1,0"), False).hosts == [Host("gpu2", (1, 0))]
    assert place_of(HostChoice(ranks=3), False) == ([Host("host 0", (0, 1, 2))], False, None)


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (HostChoice(ranks=6), "--ranks 6, and gpu1 has 4 slots: asked 6, have 4"),
        (HostChoice(num_nodes=3), "has 2 hosts: asked 3, have 2"),
        (HostChoice(launcher="shh"), "--launcher 'shh'; expected one of ssh, pdsh"),
        (HostChoice(launcher="ssh", node_rank=0), "starts all hosts from here; leave out --node_rank"),
        (HostChoice(launcher="ssh", stays_here=True), "leave out --launcher"),
        (HostChoice(include="gpu3"), "names the host 'gpu3'; there are gpu1, gpu2"),
    ],
)
def test_what_does_not_fit_is_refused(hostfile: Path, choice: HostChoice, says: str) -> None:
    with pytest.raises(ShardwiseError, match=says):
        place_of(choice._replace(hostfile=hostfile), False)


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (HostChoice(launcher="ssh", ranks=2, num_nodes=2), "--launcher ssh needs --hostfile"),
        (HostChoice(launcher="openmpi"), "--launcher openmpi needs --hostfile"),
        (HostChoice(num_nodes=2), "several hosts need --master_addr"),
        (HostChoice(node_rank=1), "--node_rank 1 of 1 host"),
        (HostChoice(leaves_here=True), "--force_multi reaches the hosts of a hostfile"),
        (HostChoice(renders=True), "--render prints what a back end starts"),
    ],
)
def test_what_is_missing_is_named(choice: HostChoice, says: str) -> None:
    with pytest.raises(ShardwiseError, match=says):
        place_of(choice, False)


def test_variables_are_passed_on_by_name_value_or_beginning() -> None:
    here = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "a", "HOME": "/root", "TOKEN": "t"}
    choice = HostChoice(exports=("TOKEN", "X=a=b", "PYTHONPATH=b"))
    assert exported(choice, True, here) == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "b", "TOKEN": "t", "X": "a=b"}
    assert exported(choice, False, here) == {"TOKEN": "t", "X": "a=b", "PYTHONPATH": "b"}
    with pytest.raises(UsageError, match="--export OTHER: the variable is not set here"):
        exported(HostChoice(exports=("OTHER",)), True, here)


def test_a_command_is_repeated_without_values_of_variables() -> None:
    choice = HostChoice(2, Path("hosts"), launcher="ssh", exports=("TOKEN=secret",), leaves_here=True)
    assert choice.words() == [
        *("--ranks", "2", "--hostfile", "hosts", "--launcher", "ssh", "--export", "TOKEN", "--force_multi")
    ]
    assert choice.names_hosts() and not HostChoice(ranks=2, exports=("A=1",)).names_hosts()
