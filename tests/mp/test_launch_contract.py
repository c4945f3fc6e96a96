"""What a script finds when numarun starts it: environment, CPUs, memory policy, streams, arguments."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from numarun_process import LIMIT_S, NUMARUN, needs_two_cores, run, run_gloo, start, stderr_if_failed

from numadist.binding import current_binding
from numadist.topology.cpuset import format_list

pytestmark = [pytest.mark.mp, needs_two_cores]

TWO = ("--quiet", "--nproc-per-socket", "2")
CPUS = sorted(os.sched_getaffinity(0))


def script(folder: Path, body: str) -> Path:
    path = folder / "script.py"
    path.write_text(f"import json, os, sys\n{body}\n")
    return path


def by_rank(done: subprocess.CompletedProcess) -> dict[int, dict]:
    """The JSON object each rank printed."""
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("[r").split("] ", 1) for line in done.stdout.splitlines()]
    return {int(rank): json.loads(text) for rank, text in lines}


def clean_environment(**more: str) -> dict[str, str]:
    dropped = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {**{k: v for k, v in os.environ.items() if k not in dropped}, **more}


def search_path(first: Path) -> str:
    """PYTHONPATH with a folder before those of the tests."""
    return os.pathsep.join([str(first), *sys.path])


def test_environment_is_torchruns(tmp_path):
    seen = by_rank(
        run(script(tmp_path, "print(json.dumps(dict(os.environ)))"), *TWO, env=clean_environment())
    )
    assert sorted(seen) == [0, 1]
    for rank, environ in seen.items():
        wanted = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
            "LOCAL_SIZE": "2",
            "OMP_NUM_THREADS": environ["MKL_NUM_THREADS"],
        }
        assert {name: environ.get(name) for name in wanted} == wanted
        assert environ["TORCHELASTIC_RUN_ID"] == environ["NUMADIST_JOB_ID"] != ""
        assert not Path(environ["TORCHELASTIC_ERROR_FILE"]).parent.exists(), "left behind after the run"
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]
    assert seen[0]["NUMADIST_NODE_MAP"].split("|") == [seen[0]["NUMADIST_NODES"], seen[1]["NUMADIST_NODES"]]


BINDING = """
from numadist.binding import current_binding
from numadist.topology.cpuset import format_list
b = current_binding()
maps = {line.split()[1] for line in open("/proc/self/numa_maps")}
print(json.dumps({"cpus": b.cpus, "policy": b.policy, "nodes": b.mem_nodes, "maps": sorted(maps)}))
"""


def test_each_rank_reads_back_its_own_cpus_and_the_bind_policy(tmp_path):
    seen = by_rank(run(script(tmp_path, BINDING), *TWO))
    assert sorted(cpu for rank in seen.values() for cpu in rank["cpus"]) == CPUS
    for rank in seen.values():
        assert rank["policy"] == "bind"
        assert rank["maps"] == [f"bind:{','.join(map(str, rank['nodes']))}"], (
            "a mapping was made before binding"
        )


def test_mem_none_leaves_the_policy_alone(tmp_path):
    seen = by_rank(run(script(tmp_path, BINDING), *TWO, "--mem", "none"))
    assert {rank["policy"] for rank in seen.values()} == {current_binding().policy}


@pytest.mark.parametrize(
    ("options", "environ", "wanted"),
    [
        ((), {}, "1"),
        ((), {"OMP_NUM_THREADS": "3"}, "3"),
        (("--omp-threads", "5"), {"OMP_NUM_THREADS": "3"}, "5"),
        (("--omp-threads", "auto"), {"OMP_NUM_THREADS": "3"}, "1"),
    ],
)
def test_threads_are_flag_then_environment_then_cores(tmp_path, options, environ, wanted):
    path = script(
        tmp_path, "print(json.dumps([os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS']]))"
    )
    cpus = "|".join(str(cpu) for cpu in CPUS[:2])
    done = run(
        path, "--quiet", "--prefix", "always", "--cpus", cpus, *options, env=clean_environment(**environ)
    )
    assert all(seen == [wanted, wanted] for seen in by_rank(done).values()), done.stdout


def test_omp_bind_cores_pins_one_thread_a_core(tmp_path):
    path = script(tmp_path, "print(json.dumps([os.environ.get(n) for n in ('OMP_PROC_BIND', 'OMP_PLACES')]))")
    done = run(path, "--quiet", "--prefix", "always", "--nproc-per-node", "1", "--omp-bind", "cores")
    ((bind, places),) = by_rank(done).values()
    assert bind == "true"
    assert sorted(places.split(",")) == sorted(f"{{{cpu}}}" for cpu in CPUS)
    plain = by_rank(run(path, *TWO, env={k: v for k, v in os.environ.items() if not k.startswith("OMP_")}))
    assert list(plain.values()) == [[None, None]] * 2, "no places by default: they narrow the main thread"


def test_arguments_after_the_script_are_untouched_and_local_rank_is_never_added(tmp_path):
    words = ("--nproc-per-node", "7", "-m", "--", "--local_rank=x")
    seen = by_rank(run(script(tmp_path, "print(json.dumps(sys.argv[1:]))"), *TWO, "--", args=words))
    assert list(seen.values()) == [list(words)] * 2


def test_module_runs_like_python_dash_m(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "mod.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = subprocess.run(
        [*NUMARUN, "--quiet", "--nproc_per_socket=2", "-m", "pkg.mod", "-v"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert sorted(done.stdout.splitlines()) == ["[r0] __main__ ['-v']", "[r1] __main__ ['-v']"]


def test_no_python_runs_any_program():
    command = [*NUMARUN, *TWO, "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert sorted(done.stdout.splitlines()) == ["[r0] 0 of 2", "[r1] 1 of 2"]


def test_python_exec_names_the_interpreter(tmp_path):
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nWHO=fake exec {sys.executable} "$@"\n')
    fake.chmod(0o755)
    path = script(tmp_path, "print(json.dumps(os.environ['WHO']))")
    seen = by_rank(run(path, *TWO, env={**os.environ, "PYTHON_EXEC": str(fake)}))
    assert seen == {0: "fake", 1: "fake"}


def test_lines_of_two_ranks_never_mix(tmp_path):
    """Both ranks write one line in many small pieces."""
    pieces = "('a' * 50, os.environ['RANK'], 'b' * 50 + '\\n')"
    body = f"for i in range(300):\n  for piece in {pieces}: os.write(1, piece.encode())"
    done = run(script(tmp_path, body), *TWO)
    assert done.returncode == 0, done.stderr
    wanted = {f"[r{r}] {'a' * 50}{r}{'b' * 50}" for r in (0, 1)}
    assert set(done.stdout.splitlines()) == wanted
    assert len(done.stdout.splitlines()) == 600


def test_a_last_line_without_newline_is_not_lost(tmp_path):
    done = run(script(tmp_path, "os.write(1, b'out'); os.write(2, b'err')"), *TWO)
    assert sorted(done.stdout.splitlines()) == ["[r0] out", "[r1] out"]
    assert sorted(done.stderr.splitlines()) == ["[r0] err", "[r1] err"]


def test_a_single_rank_writes_without_prefix(tmp_path):
    path = script(tmp_path, "print('plain')")
    assert run(path, "--quiet", "--nproc-per-node", "1").stdout == "plain\n"
    assert run(path, "--quiet", "--nproc-per-node", "1", "--prefix", "always").stdout == "[r0] plain\n"


def test_only_asked_ranks_are_shown_and_the_log_holds_all(tmp_path):
    logs = tmp_path / "logs"
    path = script(tmp_path, "print('out', os.environ['RANK']); print('err', file=sys.stderr)")
    done = run(path, *TWO, "--ranks", "1", "--log-dir", str(logs))
    assert (done.stdout, done.stderr) == ("[r1] out 1\n", "[r1] err\n")
    written = {p.name: p.read_text() for p in logs.iterdir()}
    assert written == {"r0.out": "out 0\n", "r0.err": "err\n", "r1.out": "out 1\n", "r1.err": "err\n"}


def test_rank_0_keeps_stdin_and_the_others_read_nothing(tmp_path):
    seen = by_rank(run(script(tmp_path, "print(json.dumps(sys.stdin.read()))"), *TWO, input="typed"))
    assert seen == {0: "typed", 1: ""}


def test_verbose_shows_what_each_rank_is_given(tmp_path):
    path = script(tmp_path, "print(json.dumps(dict(os.environ)))")
    done = run(
        path, "--nproc-per-socket", "2", "--verbose", "--env", "GREETING=good day", env=clean_environment()
    )
    shown = {}
    for line in done.stderr.splitlines():
        if found := re.match(r"numarun: r(\d) environment (.*)", line):
            shown[int(found[1])] = dict(word.split("=", 1) for word in shlex.split(found[2]))
    seen = by_rank(done)
    assert sorted(shown) == sorted(seen) == [0, 1]
    for rank, variables in shown.items():
        assert {name: seen[rank][name] for name in variables} == variables
        assert variables["RANK"] == str(rank)
        assert variables["GREETING"] == "good day"
        assert "PATH" not in variables, "what is only passed on is not shown"


def test_env_option_reaches_the_ranks(tmp_path):
    path = script(tmp_path, "print(json.dumps([os.environ['A'], os.environ['OMP_NUM_THREADS']]))")
    seen = by_rank(run(path, *TWO, "--env", "A=b=c", "--env", "OMP_NUM_THREADS=9"))
    assert seen == {0: ["b=c", "9"], 1: ["b=c", "9"]}


def test_preload_puts_a_library_into_every_rank(tmp_path):
    library = next(
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libm.so" in line
    )
    path = script(tmp_path, "print(json.dumps(os.environ['LD_PRELOAD']))")
    seen = by_rank(run(path, *TWO, "--preload", library))
    assert seen == {0: library, 1: library}


def test_preload_of_what_is_not_there_is_told(tmp_path):
    done = run(script(tmp_path, ""), *TWO, "--preload", "tcmaloc")
    wanted = "numarun: error: --preload tcmaloc: no such file; short names are tcmalloc, jemalloc, iomp5\n"
    assert (done.returncode, done.stderr) == (2, wanted)


def test_a_rank_that_importing_torch_narrowed_says_so(tmp_path):
    """The GOMP trap: places a thread each leave the main thread, and all it starts, one CPU."""
    environ = clean_environment(OMP_PROC_BIND="close", OMP_PLACES=",".join(f"{{{cpu}}}" for cpu in CPUS))
    path = script(tmp_path, "import torch; print(len(os.sched_getaffinity(0)))")
    done = run(path, "--quiet", "--nproc-per-node", "1", env=environ)
    assert done.stdout == "1\n"
    assert f"this rank was started on CPUs {format_list(CPUS)} and now has only {CPUS[0]}" in done.stderr
    assert "in the environment: after import torch each rank may see one CPU; unset it" in done.stderr


def test_a_taken_port_is_told_before_anything_starts(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run(script(tmp_path, "print('started')"), "--quiet", "--master-port", str(port))
    assert done.returncode == 125
    assert done.stdout == ""
    wanted = f"--master-port {port} is in use on 127.0.0.1; leave the option out to let numarun choose"
    assert done.stderr == f"numarun: error: {wanted}\n"


def test_a_script_without_torch_runs_without_an_import_of_torch_or_numpy(tmp_path):
    """What makes the start quick: neither numarun nor a rank reads what takes seconds, unless the script does."""
    for name in ("torch", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} was imported')")
    body = "print(json.dumps(sorted({'torch', 'numpy'} & set(sys.modules))))"
    done = run(script(tmp_path, body), *TWO, env={**os.environ, "PYTHONPATH": search_path(tmp_path)})
    assert by_rank(done) == {0: [], 1: []}
    assert done.stderr == ""


def test_ranks_rendezvous_over_the_store_the_launcher_serves(tmp_path):
    body = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(x)
after_import = sorted(os.sched_getaffinity(0))
print(json.dumps([x.item(), torch.get_num_threads(), after_import]))
dist.destroy_process_group()
"""
    path = script(tmp_path, body)
    seen = by_rank(run_gloo(lambda: run(path, *TWO, env=clean_environment()), stderr_if_failed))
    assert [x for x, *_ in seen.values()] == [3.0, 3.0]
    for _, threads, cpus in seen.values():
        assert threads == len(cpus), "torch's threads are the rank's cores, and importing it narrowed nothing"


MEETING = """
import torch, torch.distributed as dist
for _ in range(2):
    dist.init_process_group("numa")
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    dist.destroy_process_group()
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if not restart:
    sys.exit("once more")
print(json.dumps([type(store).__name__, x.item(), restart]))
"""


def test_ranks_of_one_machine_meet_in_a_file(tmp_path):
    """So no name is looked up, no store is served, and a restarted job finds an empty one; wherever the script goes."""
    body = f"os.chdir('/')\n{MEETING}"
    environ = clean_environment(TMPDIR=".", PYTHONPATH=os.pathsep.join(sys.path))
    done = run(script(tmp_path, body), *TWO, "--max-restarts", "1", env=environ, cwd=tmp_path)
    assert by_rank(done) == {0: ["FileStore", 3.0, 1], 1: ["FileStore", 3.0, 1]}


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="a network namespace needs root and ip"
)
def test_without_a_network_nothing_is_said_of_names(tmp_path):
    body = "import torch.distributed as dist; dist.init_process_group('numa'); dist.destroy_process_group()"
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    command = [*alone, *NUMARUN, *TWO, str(script(tmp_path, body))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=clean_environment())
    assert (done.returncode, done.stderr) == (0, "")


def test_a_store_that_cannot_start_ends_the_run_with_125(tmp_path):
    """A torch that cannot be imported by numarun's own Python."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('no torch here')")
    body = "import socket; socket.create_connection(('127.0.0.1', int(os.environ['MASTER_PORT']))).recv(1)"
    done = run(script(tmp_path, body), *TWO, env={**os.environ, "PYTHONPATH": search_path(broken)})
    assert done.returncode == 125, done.stderr
    assert "ImportError: no torch here" in done.stderr
    assert "numarun: error: the rendezvous store ended (its error stands above)" in done.stderr


def test_a_log_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    done = run(script(tmp_path, ""), *TWO, "--log-dir", str(tmp_path / "file" / "logs"))
    wanted = f"numarun: error: --log-dir: cannot make '{tmp_path}/file/logs': Not a directory\n"
    assert (done.returncode, done.stderr) == (125, wanted)


def test_two_jobs_at_once_have_ports_of_their_own(tmp_path):
    """Both jobs run until their stdin ends, which is after both have told their port."""
    path = script(tmp_path, "print(json.dumps(os.environ['MASTER_PORT']), flush=True); sys.stdin.read()")
    jobs = [start(path, "--quiet", "--nproc-per-node", "1", stdin=subprocess.PIPE) for _ in range(2)]
    ports = [json.loads(job.stdout.readline()) for job in jobs]
    for job in jobs:
        job.communicate(timeout=LIMIT_S)
    assert [job.returncode for job in jobs] == [0, 0]
    assert ports[0] != ports[1]


def test_nothing_but_the_kernel_is_needed_to_bind(tmp_path):
    """No numactl, no lscpu: an empty PATH changes nothing."""
    environ = {**os.environ, "PATH": str(tmp_path)}
    seen = by_rank(run(script(tmp_path, BINDING), *TWO, env=environ))
    assert {rank["policy"] for rank in seen.values()} == {"bind"}


TESTS = Path(__file__).resolve().parents[1]
FAKE_SYSFS = TESTS / "tools" / "with_fake_sysfs.sh"
DUMP = TESTS / "machines" / "32intel64-2p8co2t+8ve" / "fsroot.tar.gz"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount another /sys")
def test_a_whole_run_on_a_recorded_machine_stays_inside_the_live_affinity(tmp_path):
    """/sys shows 32 CPUs, this process may use its own few: the plan is their intersection."""
    subprocess.run(["tar", "-xzf", DUMP, "-C", tmp_path], check=True)
    command = ["bash", str(FAKE_SYSFS), str(tmp_path / "fsroot"), *NUMARUN, "--dry-run", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if "permission denied" in done.stderr.lower():
        pytest.skip(f"mount is refused here: {done.stderr.strip()}")
    plan = json.loads(done.stdout)
    assert len(plan["machine"]["packages"]) >= 1
    assert plan["machine"]["online_cpus"] == "0-31"
    assert sorted(cpu for r in plan["ranks"] for cpu in r["cpus"]) == [cpu for cpu in CPUS if cpu < 16]
