"""The rendezvous store, on a socket that is bound before any rank starts: no port race, no port 29500.

The launcher holds the listening socket. When the first rank connects, it forks a process that imports
torch and serves the store on that socket: a script without torch never pays for it, the launcher keeps
answering signals while torch loads, and a restart gets an empty store on the same port.
"""

import errno
import importlib
import os
import signal
import socket
import time
import traceback
from typing import Any

from numadist import _syscalls
from numadist.errors import NumadistError
from numadist.launch.report import say
from numadist.topology.cpuset import format_list

BACKLOG = 1024
SAY_EVERY_S = 5.0
RETRY_S = 0.2  # while nobody listens
JOIN_TIMEOUT_S = 600.0  # torchrun's


class StoreError(NumadistError):
    """The rendezvous port cannot be bound, or the store process ended."""


def listen(host: str, port: int | None, any_interface: bool) -> socket.socket:
    """A listening socket; port None lets the system choose. Raises: StoreError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        anywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
        sock.bind((anywhere if any_interface else host, port or 0))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise StoreError(
                f"--master-port {port} is in use on {host}; leave the option out to let numarun choose"
            ) from None
        raise StoreError(f"cannot listen on {host}:{port or 'any port'}: {error}") from None
    return sock


def wait_for(host: str, port: int) -> None:
    """Wait until machine 0 listens there, and say so every few seconds. Raises: StoreError after ten minutes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing runs yet that Ctrl-C would have to end
    given_up_s = time.monotonic() + JOIN_TIMEOUT_S
    said_s = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=SAY_EVERY_S).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        now = time.monotonic()
        if now >= given_up_s:
            raise StoreError(f"machine 0 is not at {host}:{port}: {reason}; waited {JOIN_TIMEOUT_S:.0f} s")
        if now >= said_s + SAY_EVERY_S:
            said_s = now
            say(f"waiting for machine 0 at {host}:{port} ({reason})")
        time.sleep(RETRY_S)


def start(sock: socket.socket, host: str, num_machines: int) -> int:
    """Fork the store process on the listening socket; its process id. Call from the main thread."""
    launcher = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _serve(sock, host, launcher, num_machines)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _serve(sock: socket.socket, host: str, launcher: int, num_machines: int) -> None:
    """Serve until killed; dies with the launcher."""
    _syscalls.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != launcher:
        return
    os.setsid()  # Ctrl-C is for the launcher alone
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    # By name: this package must import without torch, and only this process needs it.
    distributed = importlib.import_module("torch.distributed")
    port = sock.getsockname()[1]
    store = distributed.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=sock.detach(),
    )
    if num_machines > 1:
        _tell_who_lacks(store, num_machines, f"{host}:{port}")
    while store is not None:
        signal.pause()


def _tell_who_lacks(store: Any, num_machines: int, where: str) -> None:
    """Say every few seconds whose ranks have not joined, until all have.

    Ranks join by numadist/comm/register.py. Nothing is said where not even this machine's do: the script may have a
    torch that does not load numadist.
    """
    lacking = list(range(num_machines))
    while lacking:
        time.sleep(SAY_EVERY_S)
        lacking = [machine for machine in lacking if not store.check([f"numarun/machine/{machine}"])]
        if lacking and 0 not in lacking:
            word = "machine" if len(lacking) == 1 else "machines"
            say(f"waiting for {word} {format_list(lacking)} of {num_machines}: no rank has come to {where}")
