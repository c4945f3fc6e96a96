"""The environment of one rank: torchrun's contract, so any torch.distributed script runs, plus ours."""

from collections.abc import Mapping
from dataclasses import dataclass

from numadist.launch.options import Options
from numadist.launch.place import Placement, RankPlacement
from numadist.progress import terminal_or_lines
from numadist.topology.cpuset import format_list


@dataclass(frozen=True)
class Job:
    """What all ranks of one run share."""

    id: str
    master_addr: str
    master_port: int
    folder: str  # `@record` writes each rank's exception there, and ranks of one machine meet in a file there
    thread_order: tuple[int, ...] = ()  # all CPUs, best first: the order --omp-bind cores pins threads in


def error_file(job: Job, rank: int, restart: int) -> str:
    return f"{job.folder}/r{rank}.{restart}.json"


def rank_environment(
    inherited: Mapping[str, str],
    options: Options,
    plan: Placement,
    placement: RankPlacement,
    job: Job,
    restart: int,
) -> dict[str, str]:
    """All variables of one rank; options.env wins over everything. Only rank 0 tells its progress."""
    local_world_size = len(plan.ranks)
    local_rank = placement.rank
    rank = options.node_rank * local_world_size + local_rank
    world_size = options.nnodes * local_world_size
    environ = {
        **inherited,
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": options.node_rank,
        "GROUP_WORLD_SIZE": options.nnodes,
        "ROLE_NAME": options.role,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": job.master_addr,
        "MASTER_PORT": job.master_port,
        "TORCHELASTIC_RUN_ID": job.id,
        "TORCHELASTIC_RESTART_COUNT": restart,
        "TORCHELASTIC_MAX_RESTARTS": options.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # every rank is a client: the launcher serves the store
        "TORCHELASTIC_ERROR_FILE": error_file(job, rank, restart),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(s.name for s in options.signals),
        "LOCAL_SIZE": local_world_size,  # DeepSpeed's shared-memory code reads this name
        "NUMADIST_JOB_ID": job.id,
        "NUMADIST_NODES": format_list(placement.mem_nodes),
        "NUMADIST_NODE_MAP": "|".join(format_list(p.mem_nodes) for p in plan.ranks),
        "NUMADIST_CPUS": format_list(placement.cpus),
        # Copies of one virtual machine are hard to tell apart from inside.
        **({"NUMADIST_MACHINE": options.node_rank} if options.nnodes > 1 else _store(job, restart)),
        **({"NUMADIST_BACKEND": options.backend} if options.backend else {}),
        **_threads(inherited, options, placement, job),
        **dict(options.env),
        "NUMADIST_PROGRESS": progress_place(inherited, options) if rank == 0 else "",
    }
    return {name: str(value) for name, value in environ.items()}


def progress_place(inherited: Mapping[str, str], options: Options) -> str:
    """Where rank 0 tells what it is at: `lines`, a terminal's name, or nowhere."""
    asked = {**inherited, **dict(options.env)}.get("NUMADIST_PROGRESS", "" if options.quiet else "auto")
    return terminal_or_lines() if asked == "auto" else asked


def _store(job: Job, restart: int) -> dict[str, object]:
    return {"NUMADIST_STORE": f"{job.master_port}:{job.folder}/store.{restart}"}


def _threads(
    inherited: Mapping[str, str], options: Options, placement: RankPlacement, job: Job
) -> dict[str, object]:
    """OpenMP variables.

    No places by default: with libgomp, importing torch would leave the main thread and its children one CPU.
    """
    found: dict[str, object] = {"OMP_NUM_THREADS": placement.threads}
    asked = options.omp_auto or options.request.omp_threads is not None
    if asked or "MKL_NUM_THREADS" not in inherited:
        found["MKL_NUM_THREADS"] = placement.threads
    if options.omp_bind == "cores":
        found["OMP_PROC_BIND"] = "true"
        found["OMP_PLACES"] = ",".join(f"{{{cpu}}}" for cpu in job.thread_order if cpu in placement.cpus)
    return found
