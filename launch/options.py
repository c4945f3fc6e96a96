"""The command line of numarun: options before the script, everything after it untouched."""

import argparse
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from numadist.binding import POLICIES
from numadist.errors import NumadistError, TopologyError
from numadist.launch.place import Request
from numadist.topology.cpuset import parse_list

USAGE = """numarun [options] [--] script.py [args]
       numarun [options] -m pkg.mod [args]
       numarun [options] --no-python prog [args]
       numarun --topology [--json]
       numarun --check [--json]
       numarun --dry-run [--json] [options] [script.py]"""

RANK_OPTIONS = ("numa", "socket", "node")
DEFAULT_SIGNALS = "TERM,INT,HUP,QUIT,USR1,USR2"


class UsageError(NumadistError):
    """A command line numarun cannot run. exit_code: 2, or as a shell has it for a missing program."""

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Options:
    """A checked command line. command: the script or program and its own arguments."""

    request: Request
    command: tuple[str, ...]
    module: bool = False
    no_python: bool = False
    dry_run: bool = False
    topology: bool = False
    check: bool = False
    json: bool = False
    sysfs: str | None = None
    allowed_cpus: tuple[int, ...] | None = None
    allowed_mems: tuple[int, ...] | None = None
    env: tuple[tuple[str, str], ...] = ()
    omp_auto: bool = False  # `--omp-threads auto`, or a plan: wins over OMP_NUM_THREADS in the environment
    omp_bind: str = "none"
    preload: str | None = None
    plan: str | None = None
    version: bool = False
    role: str = "default"
    backend: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    max_restarts: int = 0
    prefix: str = "auto"
    ranks: tuple[int, ...] | None = None
    log_dir: str | None = None
    quiet: bool = False
    verbose: bool = False
    grace_s: float = 5.0
    signals: tuple[signal.Signals, ...] = ()


class _Parser(argparse.ArgumentParser):
    """argparse in titled groups, with our errors and a record of which options take a value."""

    def __init__(self) -> None:
        super().__init__(
            prog="numarun",
            usage=USAGE,
            allow_abbrev=False,
            description="Start one rank per NUMA node, its CPUs pinned and its memory bound. "
            "What follows the script is the script's own.",
        )
        self.takes_value: dict[str, bool] = {}
        self._group: argparse._ArgumentGroup | _Parser = self

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see numarun --help")

    def section(self, title: str) -> None:
        """Options that follow stand below this title in --help."""
        self._group = self.add_argument_group(title)

    def option(self, *names: str, help: str, flag: bool = False, **kwargs: Any) -> None:
        kwargs.setdefault("action", "store_true" if flag else "store")
        self.takes_value.update(dict.fromkeys(names, not flag))
        # argparse reads % in a help text as a format.
        self._group.add_argument(*names, help=help.replace("%", "%%"), **kwargs)


def _parser() -> _Parser:
    p = _Parser()
    _placement_options(p)
    _run_options(p)
    _report_options(p)
    return p


def _placement_options(p: _Parser) -> None:
    p.section("ranks")
    p.option("--nproc-per-numa", metavar="K", help="ranks per NUMA node (default 1)")
    p.option("--nproc-per-socket", metavar="K", help="ranks per socket")
    p.option(
        "--nproc-per-node",
        metavar="N|auto",
        help="ranks on this machine, spread evenly (torchrun's sense; auto: one per NUMA node)",
    )
    p.option("--numa-nodes", metavar="LIST", help="use only these NUMA nodes, e.g. 0,2")
    p.option("--sockets", metavar="LIST", help="use only these sockets")
    p.option("--cpus", metavar="LISTS", help="CPUs of each rank, e.g. '0-31|32-63'")
    p.option("--plan", metavar="FILE", help="ranks and threads of a plan.json, as numadist tune writes it")
    p.option("--reserve", metavar="N", default="0", help="cores kept free per rank (default 0)")
    p.option("--smt", flag=True, help="use all hardware threads of a core (default: one)")
    p.option("--no-smt", flag=True, help="one CPU per core (the default)")
    p.option(
        "--cores", choices=("all", "perf"), default="all", help="perf: only the fastest cores of a hybrid CPU"
    )
    p.section("memory")
    p.option(
        "--numa-binding", metavar="HOW", help="accepted for torchrun users; ranks are always bound to nodes"
    )
    p.option("--mem", choices=POLICIES, default="bind", help="memory policy of each rank (default bind)")
    p.option("--strict", flag=True, help="a refused or narrowed binding ends the run with exit code 125")
    p.section("threads")
    p.option("--omp-threads", metavar="auto|N", help="OMP_NUM_THREADS of each rank (auto: its cores)")
    p.option(
        "--omp-bind", choices=("none", "cores"), default="none", help="cores: pin OpenMP threads, one a core"
    )


def _run_options(p: _Parser) -> None:
    p.section("script")
    p.option("-m", "--module", flag=True, help="the script is a module name, as python -m")
    p.option("--no-python", flag=True, help="the script is a program of its own")
    p.option("--role", metavar="NAME", default="default", help="ROLE_NAME of the ranks, as torchrun has it")
    p.option("--env", metavar="K=V", action="append", default=[], help="set a variable for all ranks")
    p.option("--preload", metavar="NAME", help="tcmalloc, jemalloc, iomp5 or a path: LD_PRELOAD of the ranks")
    p.option(
        "--backend", choices=("numa",), help="numa: scripts that ask for gloo, or for none, get our backend"
    )
    p.section("several machines")
    p.option("--nnodes", metavar="N", default="1", help="number of machines (default 1)")
    p.option("--node-rank", metavar="R", default="0", help="number of this machine")
    p.option("--master-addr", metavar="HOST", help="machine 0 (default 127.0.0.1)")
    p.option("--master-port", metavar="PORT", help="rendezvous port (default: one the system chooses)")
    p.option("--standalone", flag=True, help="accepted for torchrun users; no effect")
    p.option("--rdzv-backend", metavar="NAME", help="only static, or c10d on one machine")
    p.option("--rdzv-endpoint", metavar="HOST:PORT", help="as --master-addr and --master-port")
    p.option("--rdzv-id", metavar="ID", help="accepted for torchrun users; no effect")
    p.option("--rdzv-conf", metavar="CONF", help="accepted for torchrun users; no effect")
    p.option("--local-addr", metavar="HOST", help="accepted for torchrun users; no effect")
    p.section("stopping")
    p.option(
        "--monitor-interval", metavar="S", help="accepted for torchrun users; ranks are watched all the time"
    )
    p.option("--max-restarts", metavar="N", default="0", help="restart all ranks after a failure (default 0)")
    p.option("--grace", metavar="S", default="5", help="seconds between SIGTERM and SIGKILL (default 5)")
    p.option(
        "--signals", metavar="LIST", default=DEFAULT_SIGNALS, help=f"forwarded (default {DEFAULT_SIGNALS})"
    )


def _report_options(p: _Parser) -> None:
    p.section("output")
    p.option("--prefix", choices=("auto", "always", "never"), default="auto", help="[r0] before each line")
    p.option("--ranks", "--local-ranks-filter", metavar="LIST", help="show only these ranks' output")
    p.option("--log-dir", metavar="DIR", help="also write r0.out, r0.err, ... there")
    p.option("--quiet", flag=True, help="no placement lines before the run, and no progress")
    p.option("--verbose", flag=True, help="also show the machine and each rank's environment before the run")
    p.section("instead of a run")
    p.option("--version", flag=True, help="show numadist's version and end")
    p.option("--dry-run", flag=True, help="show the placement and end")
    p.option("--topology", flag=True, help="show the machine and end")
    p.option(
        "--check", flag=True, help="look for what would slow down or break a run, with remedies, and end"
    )
    p.option("--json", flag=True, help="JSON for --dry-run, --topology and --check")
    p.option("--sysfs", metavar="ROOT", help="with --dry-run or --topology: read a recorded machine")
    p.option("--allowed-cpus", metavar="LIST", help="with --sysfs: CPUs to assume allowed")
    p.option("--allowed-mems", metavar="LIST", help="with --sysfs: memory nodes to assume allowed")


def parse(argv: Sequence[str]) -> Options:
    """Checked options of a command line. Raises: UsageError; exits after --help."""
    parser = _parser()
    own, command = _split(argv, parser)
    known, unknown = parser.parse_known_args(own)
    if unknown:
        import difflib  # late: only a typing error needs it

        near = difflib.get_close_matches(unknown[0].partition("=")[0], parser.takes_value, n=1)
        _explain_torchruns(unknown[0].partition("=")[0])
        raise UsageError(
            f"unknown option {unknown[0]}" + (f"; did you mean {near[0]}?" if near else "; see --help")
        )
    values = vars(known)
    _check_rendezvous(values)
    request = _request(values)
    if values["sysfs"] is None and (values["allowed_cpus"] or values["allowed_mems"]):
        raise UsageError("--allowed-cpus and --allowed-mems need --sysfs; on the live machine use taskset")
    return Options(
        request=request,
        command=tuple(command),
        **{
            name: values[name]
            for name in ("module", "no_python", "dry_run", "topology", "check", "json", "sysfs", "version")
        },
        **{
            name: values[name]
            for name in (
                "plan",
                "preload",
                "backend",
                "omp_bind",
                "prefix",
                "log_dir",
                "quiet",
                "verbose",
                "role",
            )
        },
        allowed_cpus=_number_list("--allowed-cpus", values["allowed_cpus"]),
        allowed_mems=_number_list("--allowed-mems", values["allowed_mems"]),
        omp_auto=(values["omp_threads"] or ("auto" if values["plan"] else None)) == "auto",
        env=tuple(_assignment(text) for text in values["env"]),
        nnodes=_integer("--nnodes", values["nnodes"], 1),
        node_rank=_integer("--node-rank", values["node_rank"], 0),
        master_addr=values["master_addr"] or "127.0.0.1",
        master_port=None
        if values["master_port"] is None
        else _integer("--master-port", values["master_port"], 0, 65535),
        max_restarts=_integer("--max-restarts", values["max_restarts"], 0),
        ranks=_number_list("--ranks", values["ranks"]),
        grace_s=_seconds("--grace", values["grace"]),
        signals=_signals(values["signals"]),
    )


def _split(argv: Sequence[str], parser: _Parser) -> tuple[list[str], list[str]]:
    """Our options, and the command from the first word that is neither an option nor its value."""
    own: list[str] = []
    words = list(argv)
    while words:
        word = words[0]
        if word == "--":
            return own, words[1:]
        if not word.startswith("-") or word == "-":
            break
        words.pop(0)
        name, equals, value = word.partition("=")
        # torchrun accepts --nproc_per_node as well as --nproc-per-node.
        name = name.replace("_", "-") if name.startswith("--") else name
        if parser.takes_value.get(name) and not equals and words:
            equals, value = "=", words.pop(0)
        own.append(name + equals + value)
    return own, words


def _check_rendezvous(values: dict[str, Any]) -> None:
    """Fold --rdzv-endpoint into --master-addr/--master-port; refuse what only torchrun can do."""
    backend = values["rdzv_backend"] or "static"
    accepted = backend == "static" or (backend == "c10d" and values["nnodes"] == "1")
    if not accepted or ":" in values["nnodes"]:
        raise UsageError(
            "numarun has no elastic rendezvous; use --nnodes/--node-rank/--master-addr, or torchrun"
        )
    host, port = _endpoint(values["rdzv_endpoint"] or "")
    values["master_addr"] = values["master_addr"] or host or None
    values["master_port"] = values["master_port"] or port or None
    num_machines = _integer("--nnodes", values["nnodes"], 1)
    if _integer("--node-rank", values["node_rank"], 0) >= num_machines:
        known = f"0-{num_machines - 1}" if num_machines > 1 else "0"
        raise UsageError(f"--node-rank {values['node_rank']} is not one of {known} (--nnodes {num_machines})")
    if num_machines > 1:
        if values["master_addr"] is None:
            raise UsageError("--nnodes > 1 needs --master-addr, the same on all machines")
        values["master_port"] = values["master_port"] or "29500"


def _endpoint(text: str) -> tuple[str, str]:
    """Host and port of `host:port`, of `[::1]:port` too, whose brackets are no part of the address."""
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise UsageError(f"--rdzv-endpoint {text!r} is not HOST:PORT (IPv6: [::1]:29500)")
        return host, port[1:]
    host, _, port = text.partition(":")
    return host, port


# What torchrun has and numarun does otherwise -> what to type instead.
_TORCHRUNS = {
    "--tee": "numarun shows all output with its rank; --log-dir DIR keeps it in files too",
    "-t": "numarun shows all output with its rank; --log-dir DIR keeps it in files too",
    "--redirects": "--log-dir DIR writes files, --ranks 0 limits what is shown",
    "-r": "--log-dir DIR writes files, --ranks 0 limits what is shown",
    "--run-path": "give the script itself",
    "--start-method": "numarun starts each rank as a new process",
    "--logs-specs": "--log-dir DIR writes files",
}


def _explain_torchruns(name: str) -> None:
    if name in _TORCHRUNS:
        raise UsageError(f"{name} is torchrun's; {_TORCHRUNS[name]}")


def _ranks_per_machine(text: str | None) -> str | None:
    """--nproc-per-node, with torchrun's words: auto is one rank per NUMA node, which is the default."""
    if text == "auto":
        return None
    if text in ("cpu", "gpu", "xpu"):
        raise UsageError(
            f"--nproc-per-node {text} is torchrun's; numarun starts one rank per NUMA node where it is left out, "
            "or give a number"
        )
    return text


def _request(values: dict[str, Any]) -> Request:
    values["nproc_per_node"] = _ranks_per_machine(values["nproc_per_node"])
    given = [per for per in RANK_OPTIONS if values[f"nproc_per_{per}"] is not None]
    if len(given) > 1:
        first, second = (f"--nproc-per-{per}" for per in given[:2])
        raise UsageError(f"{first} and {second} cannot be used together")
    named = [*(f"nproc_per_{per}" for per in given), "cpus", "numa_nodes", "sockets"]
    named = [name for name in named if values[name] is not None]
    named += [name for name in ("smt", "reserve") if values[name] not in (False, "0")]
    if values["plan"] is not None and named:
        raise UsageError(
            f"--plan and --{named[0].replace('_', '-')} cannot be used together: the plan has the CPUs of all ranks"
        )
    if values["smt"] and values["no_smt"]:
        raise UsageError("--smt and --no-smt cannot be used together")
    per = given[0] if given else "numa"
    count = _integer(f"--nproc-per-{per}", values[f"nproc_per_{per}"], 1) if given else 1
    cpus = None if values["cpus"] is None else _cpu_lists(values["cpus"])
    if cpus is not None and given and per != "node":
        raise UsageError(f"--cpus and --nproc-per-{per} cannot be used together")
    if cpus is not None and given and count != len(cpus):
        raise UsageError(f"--cpus names {len(cpus)} ranks but --nproc-per-node is {count}")
    threads = values["omp_threads"]
    return Request(
        per=per,
        count=count,
        cpus=cpus,
        numa_nodes=_number_list("--numa-nodes", values["numa_nodes"]),
        sockets=_number_list("--sockets", values["sockets"]),
        reserve=_integer("--reserve", values["reserve"], 0),
        smt=values["smt"],
        perf_cores_only=values["cores"] == "perf",
        mem=values["mem"],
        strict=values["strict"],
        omp_threads=None if threads in (None, "auto") else _integer("--omp-threads", threads, 1),
    )


def _integer(name: str, text: str, least: int, most: int | None = None) -> int:
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        allowed = f">= {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} must be an integer {allowed}, got {text!r}")
    return int(text)


def _seconds(name: str, text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d*)?", text):
        raise UsageError(f"{name} must be a number of seconds >= 0, got {text!r}")
    return float(text)


def _number_list(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    return _checked_list(text, f"{name} {text!r}: not a list of numbers (example: 0,2-3)")


def _cpu_lists(text: str) -> tuple[tuple[int, ...], ...]:
    example = "(example: 0-3,8|4-7,9)"
    return tuple(
        _checked_list(part, f"--cpus {text!r}: {part!r} is not a CPU list {example}")
        for part in text.split("|")
    )


def _checked_list(text: str, message: str) -> tuple[int, ...]:
    try:
        numbers = parse_list(text)
    except TopologyError:
        numbers = ()
    if not numbers:
        raise UsageError(message)
    return numbers


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--env must be NAME=VALUE, got {text!r}")
    return name, value


def _signals(text: str) -> tuple[signal.Signals, ...]:
    found = []
    for word in text.split(","):
        name = "SIG" + word.strip().upper().removeprefix("SIG")
        if name in ("SIGKILL", "SIGSTOP", "SIGCHLD") or name not in signal.Signals.__members__:
            raise UsageError(f"--signals: {word!r} is not a signal that can be forwarded")
        found.append(signal.Signals[name])
    return tuple(found)
