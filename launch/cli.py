"""numarun: start one pinned, memory-bound rank per NUMA node."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from numadist import config
from numadist.errors import ConfigError, NumadistError, PlacementError, PlanError, TopologyError
from numadist.launch import store
from numadist.launch.environment import Job
from numadist.launch.options import Options, UsageError, parse
from numadist.launch.place import Placement, place
from numadist.launch.preflight import check, preflight_warnings
from numadist.launch.report import plan_lines, say, warn
from numadist.launch.spawn import EXIT_CANNOT_EXECUTE, EXIT_LAUNCHER_FAILED, EXIT_NOT_FOUND
from numadist.launch.supervise import EXIT_CLOSED_OUTPUT, Supervisor
from numadist.topology.machine import Machine
from numadist.topology.render import render
from numadist.topology.sysfs import read_machine


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `numarun`; returns the exit code."""
    try:
        code = _main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except UsageError as error:
        say(f"error: {error}")
        return error.exit_code
    except (PlacementError, PlanError, TopologyError, ConfigError) as error:
        say(f"error: {error}")
        return 2
    except NumadistError as error:
        say(f"error: {error}")
        return EXIT_LAUNCHER_FAILED
    except BrokenPipeError:  # the reader of --dry-run or --topology has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_CLOSED_OUTPUT
    except OSError as error:
        say(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error.strerror}")
        return EXIT_LAUNCHER_FAILED


def _main(argv: Sequence[str]) -> int:
    if not sys.platform.startswith("linux"):
        raise UsageError(f"numarun needs Linux (found {os.uname().sysname})")
    options = _with_environment(parse(argv))
    if options.version:
        from importlib.metadata import version  # late: only this option needs it

        print(f"numadist {version('numadist')}")
        return 0
    root = options.sysfs or "/"
    machine = read_machine(root, options.allowed_cpus, options.allowed_mems)
    if options.topology:
        print(json.dumps(machine.to_dict(), indent=2) if options.json else render(machine))
        return 0
    if options.check:
        return _check(machine, options)
    if not options.dry_run and not options.command:
        raise UsageError("no script given (numarun [options] script.py [args]; see --help)")
    command = [] if options.dry_run else _command(options)
    thread_order: tuple[int, ...] = ()
    if options.plan:
        from numadist.launch.plans import with_plan  # late: a plain start must not pay for it

        options, thread_order = with_plan(options, machine, root)
    plan = place(machine, options.request)
    if options.ranks and max(options.ranks) >= len(plan.ranks):
        raise UsageError(f"--ranks {max(options.ranks)}: this machine's ranks are 0-{len(plan.ranks) - 1}")
    plan = replace(plan, warnings=(*plan.warnings, *preflight_warnings(machine, plan, os.environ, root)))
    if options.dry_run and options.json:
        print(json.dumps(plan.to_dict(machine)))
        return 0
    if options.dry_run:
        _show_plan(machine, plan, options, print)
        return 0
    if options.quiet:
        for text in plan.warnings:
            warn(text)
    else:
        _show_plan(machine, plan, options, say)
    # Only this option needs the caches, whose many files take longer to read than all the rest.
    if options.omp_bind == "cores":
        thread_order = thread_order or _thread_order(machine)
    return _run(options, plan, command, thread_order)


def _thread_order(machine: Machine) -> tuple[int, ...]:
    from numadist.topology.tree import breadth_first, build_tree  # late: a plain start must not pay for it

    return breadth_first(build_tree(machine).root)


def _check(machine: Machine, options: Options) -> int:
    """Print the findings; 1 when there is a problem."""
    findings = check(machine, place(machine, options.request), os.environ)
    if options.json:
        print(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        for f in findings:
            print(f"{'warn' if f.problem else 'ok':<6}{f.subject:<18}{f.problem or f.state}")
    return 1 if any(f.problem for f in findings) else 0


def _with_environment(options: Options) -> Options:
    """Fold in what variables decide where no option does: OMP_NUM_THREADS and NUMADIST_SYSFS."""
    root = options.sysfs or config.config().sysfs or None
    if root and not (options.dry_run or options.topology):
        raise UsageError("--sysfs is only for --dry-run and --topology: ranks run on the live machine")
    request = options.request
    inherited = os.environ.get("OMP_NUM_THREADS", "")
    if request.omp_threads is None and not options.omp_auto and inherited.isdecimal() and int(inherited):
        request = replace(request, omp_threads=int(inherited))
    env = options.env
    if options.preload:
        from numadist.launch.preload import find_library, preload_variable  # late: few runs need it

        env = (("LD_PRELOAD", preload_variable(find_library(options.preload, os.environ), os.environ)), *env)
    return replace(options, request=request, sysfs=root, env=env)


def _show_plan(machine: Machine, plan: Placement, options: Options, show: Callable[[str], None]) -> None:
    """Placement through `show` (stdout where it is the result, stderr before a run); warnings to stderr."""
    request = options.request
    where = {"numa": "NUMA node", "socket": "socket", "node": "machine"}[request.per]
    how = "CPUs as given" if request.cpus is not None else f"{request.count} per {where}"
    for line in plan_lines(machine, plan, how):
        show(line)
    if options.verbose:
        for line in render(machine).splitlines():
            show(line)
    if options.backend:
        say(f"note: scripts that ask for gloo, or for no backend, get backend {options.backend}")
    for note in machine.notes:
        say(f"note: {note}")
    for text in plan.warnings:
        warn(text)


def _run(options: Options, plan: Placement, command: list[str], thread_order: tuple[int, ...]) -> int:
    _open_standard_streams()
    # Other machines' launchers serve no store: machine 0 does, and must be reachable from them.
    sock = None
    if options.node_rank == 0:
        sock = store.listen(options.master_addr, options.master_port, any_interface=options.nnodes > 1)
    elif options.master_port:
        store.wait_for(options.master_addr, options.master_port)
    port = sock.getsockname()[1] if sock else options.master_port
    if options.log_dir:
        _make_folder("--log-dir", options.log_dir)
    job_id = os.urandom(8).hex()
    # Absolute: a rank may change its directory before it opens what lies there.
    folder = os.path.abspath(f"{os.environ.get('TMPDIR', '/tmp')}/numarun_{job_id}")
    _make_folder("TMPDIR", folder)
    try:
        job = Job(job_id, options.master_addr, port or 0, folder, thread_order)
        return Supervisor(options, plan, job, sock).run(command, dict(os.environ))
    finally:
        _remove_folder(folder)


def _make_folder(asked_by: str, path: str) -> None:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{asked_by}: cannot make {path!r}: {error.strerror}", EXIT_LAUNCHER_FAILED
        ) from None


def _remove_folder(path: str) -> None:
    try:
        for name in os.listdir(path):
            os.unlink(f"{path}/{name}")
        os.rmdir(path)
    except FileNotFoundError:  # a cleaner of temporary folders was here before
        pass


def _open_standard_streams() -> None:
    """Give closed standard streams a place, so that no pipe of ours gets their numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _command(options: Options) -> list[str]:
    """The words to exec. Raises: UsageError when the script or program cannot be run."""
    name, *arguments = options.command
    if options.no_python:
        import shutil  # late: it loads every compressor

        path = shutil.which(name)
        if path is None:
            found = os.path.exists(name)
            reason = "Permission denied" if found else "No such file or directory"
            code = EXIT_CANNOT_EXECUTE if found else EXIT_NOT_FOUND
            raise UsageError(f"cannot execute {name!r}: {reason}", code)
        return [path, *arguments]
    # -u as torchrun does: lines appear when they are printed.
    python = [os.environ.get("PYTHON_EXEC", sys.executable), "-u"]
    if options.module:
        return [*python, "-m", name, *arguments]
    try:
        os.close(os.open(name, os.O_RDONLY))
    except OSError as error:
        code = EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_CANNOT_EXECUTE
        hint = ""
        if os.path.basename(name).startswith("python") and arguments:
            hint = f"; numarun starts Python itself: numarun {' '.join(arguments[:1])} ..."
        raise UsageError(f"cannot open {name!r}: {error.strerror}{hint}", code) from None
    return [*python, name, *arguments]


if __name__ == "__main__":
    sys.exit(main())
