"""Run the ranks of a plan to their end: output, signals, failures, restarts, and nothing left behind."""

import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from numadist.launch import store
from numadist.launch.environment import Job, error_file, progress_place, rank_environment
from numadist.launch.oom import SAMPLE_EVERY_S, OomWatch
from numadist.launch.options import Options, UsageError
from numadist.launch.output import MAX_QUEUED_BYTES, PROMPT_S, Sink, Stream, poll_selector, sinks
from numadist.launch.place import Placement, RankPlacement
from numadist.launch.report import Failure, environment_line, failure_summary, say, warn
from numadist.launch.sessions import Guardian, kill_sessions
from numadist.launch.spawn import EXIT_LAUNCHER_FAILED, SpawnError, Start, Started, await_exec, spawn

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
# A pipe holds 64 KiB unless somebody asked for more, at most 1 MiB without privilege.
DRAIN_READS = 16
EXIT_CLOSED_OUTPUT = 128 + signal.SIGPIPE


@dataclass
class Rank:
    """One running or ended rank. number: its RANK; status: exit code, or minus the signal that ended it."""

    number: int
    placement: RankPlacement
    started: Started
    streams: list[Stream] = field(default_factory=list)
    status: int | None = None
    stopped_by: signal.Signals | None = None  # the last signal we sent it

    @property
    def pid(self) -> int:
        return self.started.pid

    def send(self, number: signal.Signals) -> None:
        """Signal the rank and all it started; its group id stays ours until we reap it."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # it has not reached its setsid yet
            os.kill(self.pid, number)
        except PermissionError:  # it became another user; the death signal is all that reaches it
            pass

    def poll(self) -> bool:
        """True when the rank has just ended. It stays a zombie until reap(), so its ids cannot be reused."""
        if self.status is not None:
            return False
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return False
        self.status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        return True

    def reap(self) -> None:
        """Kill what the rank left in its session, then let the kernel forget it."""
        self.send(signal.SIGKILL)
        kill_sessions({self.pid})
        os.waitpid(self.pid, 0)
        for stream in self.streams:
            stream.close()


class Supervisor:
    """One run of numarun, from the first fork to the exit code."""

    def __init__(self, options: Options, plan: Placement, job: Job, sock: socket.socket | None) -> None:
        self.options, self.plan, self.job, self.sock = options, plan, job, sock
        self.sinks = sinks()
        self.guardian = Guardian()
        self.ranks: list[Rank] = []
        self.restart = 0
        self.started_s = 0.0
        self.drained = False
        self.failure: Failure | None = None
        self.stop_signal: signal.Signals | None = None
        self.deadline_s: float | None = None
        bound = {n for p in plan.ranks if p.mem_policy == "bind" for n in p.mem_nodes}
        self.oom = OomWatch(bound)
        self.next_sample_s = 0.0
        self.store_pid: int | None = None
        self.selector = poll_selector()
        self.wakeup_read, self.wakeup_write = socket.socketpair()
        self.wakeup_read.setblocking(False)
        self.wakeup_write.setblocking(False)

    def run(self, argv: Sequence[str], environ: dict[str, str]) -> int:
        """Start, restart as often as allowed, and return numarun's exit code."""
        self.sinks = sinks(progress_place(environ, self.options))
        self._catch_signals()
        self.guardian.start()
        try:
            return self._run(argv, environ)
        finally:
            self.guardian.stop()

    def _run(self, argv: Sequence[str], environ: dict[str, str]) -> int:
        for restart in range(self.options.max_restarts + 1):
            self.restart = restart
            self.failure, self.deadline_s, self.drained = None, None, False
            try:
                self._start(argv, environ)
                self._loop()
            except SpawnError as error:
                say(f"error: {error}")
                self._end(signal.SIGKILL)
                return error.exit_code
            self._end(None)
            if self.failure is None or self.stop_signal is not None or self.sinks[1].closed:
                break
            stopped = {
                r.number: r.stopped_by for r in self.ranks if r.stopped_by and r.number != self.failure.rank
            }
            failure_summary(self.failure, stopped, self.options.log_dir)
            if self.restart < self.options.max_restarts:
                say(f"restarting all ranks ({self.restart + 1} of {self.options.max_restarts})")
        return self._exit_code()

    def _exit_code(self) -> int:
        if self.stop_signal is not None:
            return 128 + self.stop_signal
        if self.sinks[1].closed:
            return EXIT_CLOSED_OUTPUT
        return 0 if self.failure is None else self.failure.exit_code

    def _catch_signals(self) -> None:
        """Handlers do nothing: the signal's number arrives on the wake-up socket, in the loop."""
        try:
            signal.set_wakeup_fd(self.wakeup_write.fileno(), warn_on_full_buffer=False)
        except ValueError:
            raise UsageError(
                "numarun runs in the main thread of a Python process, which alone gets signals; from another thread "
                "start it as a process: subprocess.run(['numarun', ...])"
            ) from None
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in self.options.signals:
            # A signal our parent ignores (nohup, a background job) stays ignored, for the ranks too.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        if signal.SIGINT not in self.options.signals:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # not Python's KeyboardInterrupt

    def _start(self, argv: Sequence[str], environ: dict[str, str]) -> None:
        self.ranks, self.started_s = [], time.monotonic()
        self.selector.register(self.wakeup_read, selectors.EVENT_READ, self._on_wakeup)
        if self.sock is not None:
            self.selector.register(self.sock, selectors.EVENT_READ, self._on_connect)
        devnull = os.open(os.devnull, os.O_RDWR)
        for placement in self.plan.ranks:
            streams = self._streams(placement)
            outputs = [s.write_fd for s in streams] if streams else [None, None]
            environment = rank_environment(
                environ, self.options, self.plan, placement, self.job, self.restart
            )
            if self.options.verbose and not self.options.quiet:
                say(environment_line(self._number(placement), environment, environ))
            stdin = None if placement.rank == 0 else devnull
            start = Start(placement, argv, environment, self.options.request.strict, stdin, *outputs)
            rank = Rank(self._number(placement), placement, spawn(start), streams)
            self.ranks.append(rank)
            self.guardian.watch(rank.pid)
            for stream in streams:
                stream.close_write_end()
                self.selector.register(stream.read_fd, selectors.EVENT_READ, stream)
        os.close(devnull)
        for rank in self.ranks:
            await_exec(rank.started)
        for text in dict.fromkeys(w for rank in self.ranks for w in rank.started.warnings):
            warn(text)

    def _number(self, placement: RankPlacement) -> int:
        return self.options.node_rank * len(self.plan.ranks) + placement.rank

    def _streams(self, placement: RankPlacement) -> list[Stream]:
        """Pipes for stdout and stderr; none where the rank may write to ours directly."""
        options, single = self.options, len(self.plan.ranks) == 1
        prefixed = options.prefix == "always" or (options.prefix == "auto" and not single)
        if not prefixed and options.log_dir is None and options.ranks is None:
            return []
        number = self._number(placement)
        shown = options.ranks is None or placement.rank in options.ranks
        return [
            Stream(
                f"[r{number}] " if prefixed else "",
                self.sinks[fd] if shown else None,
                f"{options.log_dir}/r{number}.{name}" if options.log_dir else None,
                append=self.restart > 0,
            )
            for fd, name in ((1, "out"), (2, "err"))
        ]

    def _loop(self) -> None:
        """Serve events until all ranks have ended and their output is written."""
        while any(r.status is None for r in self.ranks) or any(s.queued_bytes for s in self.sinks.values()):
            self._watch_sinks()
            for key, _ in self.selector.select(self._timeout_s()):
                if isinstance(key.data, Stream):
                    key.data.read_some()
                elif isinstance(key.data, Sink):
                    key.data.write_some()
                else:
                    key.data()
            for stream in self._prompting():
                stream.show_prompt()
            if self.sinks[1].closed and self.deadline_s is None:
                self._stop(signal.SIGTERM)
            if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
                self._kill()
            if not self.drained and all(r.status is not None for r in self.ranks):
                self._drain()

    def _timeout_s(self) -> float:
        """Until the deadline, the next look at free memory or at a line without an end, whichever comes first."""
        now = time.monotonic()
        if now >= self.next_sample_s:
            self.oom.sample()
            self.next_sample_s = now + SAMPLE_EVERY_S
        prompt_s = now + PROMPT_S if any(s.has_partial for s in self._prompting()) else self.next_sample_s
        return max(0.0, min(self.deadline_s or self.next_sample_s, self.next_sample_s, prompt_s) - now)

    def _prompting(self) -> list[Stream]:
        """Streams of the rank that has our stdin and may wait for an answer."""
        return [stream for rank in self.ranks if rank.placement.rank == 0 for stream in rank.streams]

    def _watch_sinks(self) -> None:
        """Wait for room only where something is queued; let ranks wait while a reader is slow."""
        for sink in self.sinks.values():
            watched = sink.fd in self.selector.get_map()
            if sink.queued_bytes and not watched:
                self.selector.register(sink.fd, selectors.EVENT_WRITE, sink)
            elif not sink.queued_bytes and watched:
                self.selector.unregister(sink.fd)
        for stream in [s for r in self.ranks for s in r.streams]:
            full = stream.sink is not None and stream.sink.queued_bytes > MAX_QUEUED_BYTES
            watched = stream.read_fd in self.selector.get_map()
            if watched and (full or stream.ended):
                self.selector.unregister(stream.read_fd)
            elif not watched and not full and not stream.ended:
                self.selector.register(stream.read_fd, selectors.EVENT_READ, stream)

    def _drain(self) -> None:
        """Take what ended ranks left in their pipes, once: a grandchild may hold a pipe open for ever."""
        self.drained = True
        for stream in [s for r in self.ranks for s in r.streams]:
            for _ in range(DRAIN_READS):
                if not stream.read_some():
                    break
            stream.finish()

    def _on_wakeup(self) -> None:
        try:
            numbers = self.wakeup_read.recv(4096)
        except BlockingIOError:
            return
        for number in dict.fromkeys(numbers):
            if number == signal.SIGCHLD:
                self._on_child()
            else:
                self._on_signal(signal.Signals(number))

    def _on_child(self) -> None:
        failed = [rank for rank in self.ranks if rank.poll() and rank.status]
        if failed and self.failure is None and self.stop_signal is None:
            # Of several found at once, one killed by a signal is the cause and the others noticed it.
            self.failure = self._describe(min(failed, key=lambda rank: (rank.status or 0) > 0))
            self._stop(signal.SIGTERM)
        if self.store_pid is None:
            return
        ended, status = os.waitpid(self.store_pid, os.WNOHANG)
        if ended:
            self.store_pid = None
            code = os.waitstatus_to_exitcode(status)
            how = "its error stands above" if code > 0 else f"killed by signal {-code}"
            raise SpawnError(
                f"the rendezvous store ended ({how}); numarun's own Python needs torch", EXIT_LAUNCHER_FAILED
            )

    def _describe(self, rank: Rank) -> Failure:
        return Failure(
            rank=rank.number,
            placement=rank.placement,
            pid=rank.pid,
            status=rank.status or 0,
            oom=self.oom.explain(rank.placement.mem_nodes) if rank.status == -signal.SIGKILL else None,
            seconds=time.monotonic() - self.started_s,
            error_file=error_file(self.job, rank.placement.rank, self.restart),
            stderr=rank.streams[1] if rank.streams else None,
        )

    def _on_signal(self, number: signal.Signals) -> None:
        if number not in STOP_SIGNALS:
            self._send(number)
        elif self.stop_signal is None:
            self.stop_signal = number
            self._stop(number)
        else:  # asked twice: do not wait any longer
            self._kill()

    def _on_connect(self) -> None:
        assert self.sock is not None
        self.selector.unregister(self.sock)
        self.store_pid = store.start(self.sock, self.job.master_addr, self.options.nnodes)

    def _send(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            if rank.status is None:
                rank.stopped_by = number
                rank.send(number)

    def _stop(self, number: signal.Signals) -> None:
        self._send(number)
        if self.deadline_s is None:
            self.deadline_s = time.monotonic() + self.options.grace_s

    def _kill(self) -> None:
        """The grace is over: no rank survives, and a reader that does not read is not waited for."""
        self._send(signal.SIGKILL)
        self.deadline_s = time.monotonic() + self.options.grace_s
        if self.stop_signal is not None and all(r.status is not None for r in self.ranks):
            for sink in self.sinks.values():
                sink.drop()

    def _end(self, number: signal.Signals | None) -> None:
        """Leave no process, no open pipe and no store behind."""
        if number is not None:
            self._send(number)
        for rank in self.ranks:
            rank.reap()
            self.guardian.forget(rank.pid)
        if self.store_pid is not None:
            os.kill(self.store_pid, signal.SIGKILL)
            os.waitpid(self.store_pid, 0)
            self.store_pid = None
        for key in list(self.selector.get_map().values()):
            self.selector.unregister(key.fileobj)
