"""Containers, users, limits: ranks in other namespaces, without pidfds, short of memory, dying early. Root only."""

import ctypes
import importlib.util
import os
import re
import resource
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import ranks

from numadist import _native
from numadist.errors import CommError, PeerLost

pytestmark = [
    pytest.mark.mp,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="changing user and namespaces needs root"),
]

SECCOMP = Path(__file__).resolve().parents[1] / "tools" / "seccomp_eperm.py"
CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x20000000, 0x40000000
PR_SET_DUMPABLE = 4
NUMA_USERS = (4711, 4712)
NEVER_S = 1e5  # a deadline no test lives to see
libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags):
    assert libc.unshare(flags) == 0, os.strerror(ctypes.get_errno())


def sum_and_message(rank, world, group=None):
    """A sum and a ring of messages; what this rank got."""
    x, y = torch.full((100_000,), rank + 1.0), torch.empty(1)
    dist.all_reduce(x, group=group)
    request = dist.isend(torch.tensor([float(rank)]), (rank + 1) % world, group=group)
    dist.recv(y, (rank - 1) % world, group=group)
    request.wait()
    return x.unique().tolist(), y.item()


def outcome(rank, world, make):
    """What a rank's make() raised: (kind, text), or None."""
    try:
        make(rank, world)
    except CommError as error:
        return type(error).__name__, str(error)


def small_shm_of_ones_own(rank):
    unshare(CLONE_NEWNS | CLONE_NEWNET)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True)


def large_sum(rank, world):
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
    x = torch.full((24 << 20,), rank + 1.0)  # 96 MiB
    dist.all_reduce(x)
    return x.min().item(), x.max().item()


def test_ranks_in_mount_and_network_namespaces_of_their_own_with_64_mb_of_shm():
    with ranks(2, prepare=small_shm_of_ones_own) as pool:
        assert pool.run(sum_and_message) == [([3.0], 1.0), ([3.0], 0.0)]
        assert pool.run(large_sum) == [(3.0, 3.0)] * 2


def pid_namespace_of_ones_own(rank):
    unshare(CLONE_NEWPID)
    child = os.fork()  # only children live in the new namespace
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def make_group(rank, world):
    dist.new_group(backend="numa")


def test_ranks_in_different_pid_namespaces_are_told_what_to_do():
    with ranks(2, backend="gloo", prepare=pid_namespace_of_ones_own) as pool:
        for rank, (kind, text) in enumerate(pool.run(outcome, make_group)):
            assert kind == CommError.__name__
            seen = re.findall(r"rank \d is in pid namespace pid:\[\d+\], rank \d in pid:\[\d+\]", text)
            assert len(seen) == 1, f"rank {rank}: {text}"
            assert "docker run --pid=host" in text
            assert "NUMADIST_MACHINE" in text


def test_pid_namespaces_named_as_machines_talk_over_gloo():
    with ranks(2, machines="ab", prepare=pid_namespace_of_ones_own) as pool:
        assert pool.run(sum_and_message) == [([3.0], 1.0), ([3.0], 0.0)]


def become(user):
    # The user may not be able to read the interpreter's folders.
    import numadist.comm.connect  # noqa: F401

    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    # A process that changed its user hides from its equals; one that was started as the user does not.
    assert libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0


def first_user(rank):
    become(NUMA_USERS[0])


def second_user(rank):
    become(NUMA_USERS[1])


def test_jobs_of_two_users_at_once():
    with ranks(2, prepare=first_user) as one, ranks(2, prepare=second_user) as two:
        for pool in (one, two):
            for rank in range(2):
                pool.send(rank, sum_and_message)
        for pool in (one, two):
            assert pool.answers([0, 1]) == [([3.0], 1.0), ([3.0], 0.0)]


def open_foreign_segment(rank, world, pid, fd):
    try:
        os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR))
    except OSError as error:
        return type(error).__name__
    return "opened"


def test_only_the_jobs_user_can_open_its_segment():
    fd = _native.create_segment(2, 7, 0, None)
    try:
        with ranks(1, prepare=first_user) as pool:
            assert pool.run(open_foreign_segment, os.getpid(), fd) == [PermissionError.__name__]
        assert open_foreign_segment(0, 1, os.getpid(), fd) == "opened"
    finally:
        os.close(fd)


def refuse_pidfds(rank):
    spec = importlib.util.spec_from_file_location("seccomp_eperm", SECCOMP)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.NR["pidfd_open"] = 434  # the same on all architectures
    tool.install(["pidfd_open"])
    with pytest.raises(PermissionError):
        os.pidfd_open(os.getpid())


def sum_for_ever(rank, world):
    while True:
        dist.all_reduce(torch.ones(10))


def test_without_pidfds_a_killed_rank_is_lost_long_before_the_deadline():
    with ranks(2, prepare=refuse_pidfds, timeout_s=NEVER_S) as pool:
        assert pool.run(sum_and_message) == [([3.0], 1.0), ([3.0], 0.0)]
        pool.send(0, outcome, sum_for_ever)
        pool.processes[1].kill()
        pool.processes[1].join()
        ((kind, text),) = pool.answers([0])
        assert kind == PeerLost.__name__, text


def small_files_on_rank_0(rank):
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


def test_a_segment_that_does_not_fit_is_told_to_all_ranks():
    with ranks(2, backend="gloo", prepare=small_files_on_rank_0) as pool:
        for rank, (kind, text) in enumerate(pool.run(outcome, make_group)):
            assert kind == CommError.__name__
            assert "cannot make a shared segment for 2 ranks: File too large" in text, f"rank {rank}: {text}"


def join_and_die(rank, world, path, dies):
    """Rank `dies` tells the others that it is there, and no more."""
    from numadist.comm import connect, members

    store = dist.FileStore(path, world)
    if rank == dies:
        members.meet(store, rank, world, NEVER_S)
        os._exit(1)
    try:
        connect.connect(store, rank, world, NEVER_S)
    except CommError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("dies", [0, 2])
def test_a_rank_that_dies_before_it_opens_the_segment_is_lost_long_before_the_deadline(tmp_path, dies):
    with ranks(3) as pool:
        for rank in range(3):
            pool.send(rank, join_and_die, str(tmp_path / "store"), dies)
        pool.processes[dies].join()
        for kind, text in pool.answers([rank for rank in range(3) if rank != dies]):
            assert kind == PeerLost.__name__, text
            assert f"rank {dies} (pid {pool.pids[dies]}) is gone" in text, text
