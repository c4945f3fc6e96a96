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
import traceback

from numadist import _syscalls
from numadist.errors import NumadistError

BACKLOG = 1024


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


def start(sock: socket.socket, host: str) -> int:
    """Fork the store process on the listening socket; its process id. Call from the main thread."""
    launcher = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _serve(sock, host, launcher)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _serve(sock: socket.socket, host: str, launcher: int) -> None:
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
    store = distributed.TCPStore(
        host,
        sock.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=sock.detach(),
    )
    while store is not None:
        signal.pause()
