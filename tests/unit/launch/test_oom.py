"""A rank killed for memory: what numarun says from the samples it took while the rank lived."""

from handmade import write_machine

from numadist.launch.oom import OomWatch

GIB_KB = 1 << 20


def machine(root, kills: int, free_kb: int):
    files = {
        "proc/vmstat": f"nr_free_pages 1\noom_kill {kills}\npgmajfault 2",
        "sys/devices/system/node/node8/meminfo": f"Node 8 MemTotal: {128 * GIB_KB} kB\nNode 8 MemFree: {free_kb} kB",
    }
    return write_machine(root, cores=[[0]], packages=[[0]], nodes={8: [0]}, files=files)


def test_the_node_that_ran_out_is_named_with_what_it_had(tmp_path):
    watch = OomWatch([8], str(machine(tmp_path, kills=3, free_kb=GIB_KB)))
    machine(tmp_path, kills=3, free_kb=GIB_KB // 10)
    watch.sample()
    machine(tmp_path, kills=4, free_kb=100 * GIB_KB)  # the rank is dead, its memory free again
    wanted = "kernel OOM: node 8 had 0.1 of 128.0 GiB free - use --mem preferred or fewer bytes per rank"
    assert watch.explain([8]) == wanted


def test_a_kill_without_an_oom_kill_has_no_explanation(tmp_path):
    watch = OomWatch([8], str(machine(tmp_path, kills=3, free_kb=0)))
    assert watch.explain([8]) is None


def test_a_sample_from_before_the_shortage_is_an_upper_bound(tmp_path):
    watch = OomWatch([8], str(machine(tmp_path, kills=3, free_kb=100 * GIB_KB)))
    machine(tmp_path, kills=4, free_kb=100 * GIB_KB)
    assert watch.explain([8]) == (
        "kernel OOM: node 8 had less than 100.0 of 128.0 GiB free - use --mem preferred or fewer bytes per rank"
    )


def test_a_limit_of_the_cgroup_is_told_from_a_full_node(tmp_path):
    root = machine(tmp_path, kills=3, free_kb=GIB_KB)
    events = root / "sys/fs/cgroup/box/memory.events"
    events.parent.mkdir(parents=True)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("0::/box\n")
    events.write_text("low 0\nmax 7\noom 1\noom_kill 1\n")
    watch = OomWatch([8], str(root))
    machine(root, kills=4, free_kb=GIB_KB)
    events.write_text("low 0\nmax 9\noom 2\noom_kill 2\n")
    assert watch.explain([8]) == "kernel OOM: the memory limit of this cgroup was reached (memory.max)"
