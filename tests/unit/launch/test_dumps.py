"""`numarun --dry-run --json` on recorded machines: one rank per NUMA node, and one per socket."""

import json
import subprocess
import sys

from numadist.topology.cpuset import parse_list


def dry_run(*options: str) -> dict:
    command = [
        sys.executable,
        "-m",
        "numadist.launch.cli",
        "--dry-run",
        "--json",
        *options,
        "--omp-threads",
        "auto",
    ]
    run = subprocess.run([*command, "script.py"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_one_rank_per_numa_node(recorded):
    plan = dry_run(*recorded.options)
    wanted = recorded.expected["proposed_placement"]["one_rank_per_numa_node"]
    seen = [(r["numa_nodes"], r["cpus"], r["threads"], r["mem_nodes"]) for r in plan["ranks"]]
    assert seen == [
        (w["nodes_of_cpus"], list(parse_list(w["cpus_one_per_core"])), w["cores"], w["membind"])
        for w in wanted
    ]
    assert [r["rank"] for r in plan["ranks"]] == list(range(len(wanted)))
    assert {r["mem_policy"] for r in plan["ranks"]} == {"bind"}
    for rank, want in enumerate(wanted):
        if want["note"]:
            assert f"rank {rank}: {want['note']}" in plan["warnings"]


def test_smt_gives_each_rank_all_threads_of_its_cores(recorded):
    plan = dry_run("--smt", *recorded.options)
    wanted = recorded.expected["proposed_placement"]["one_rank_per_numa_node"]
    assert [r["cpus"] for r in plan["ranks"]] == [list(parse_list(w["cpus_all"])) for w in wanted]


def test_one_rank_per_socket(recorded):
    plan = dry_run("--nproc-per-socket", "1", *recorded.options)
    wanted = recorded.expected["proposed_placement"]["one_rank_per_socket"]
    assert [(r["cpus"], r["threads"]) for r in plan["ranks"]] == [
        (list(parse_list(w["cpus_one_per_core"])), w["cores"]) for w in wanted
    ]
    for rank, want in enumerate(wanted):
        if want["membind"] is not None:
            assert plan["ranks"][rank]["mem_nodes"] == want["membind"]
        else:  # no memory of its own: some node is named, with a warning
            assert plan["ranks"][rank]["mem_nodes"]
            assert any(text.startswith(f"rank {rank}: ") for text in plan["warnings"]), plan["warnings"]


def test_json_has_exactly_the_promised_keys(dump):
    plan = dry_run(*dump("32intel64-2p8co2t+8ve").options)
    assert list(plan) == ["ranks", "warnings", "machine"]
    assert plan["ranks"][0] == {
        "rank": 0,
        "cpus": [0, 1, 2, 3, 4, 5, 6, 7],
        "mem_nodes": [0],
        "mem_policy": "bind",
        "threads": 8,
        "package": 0,
        "numa_nodes": [0],
    }


def test_cpus_in_no_node_are_named(dump):
    plan = dry_run(*dump("offline-cpu0-node0").options)
    assert plan["warnings"] == [
        "CPUs 4,6,8,10,12,14,16,18,20 are in no online NUMA node and get no rank; "
        "use --nproc-per-socket or --cpus to use them"
    ]
