"""Make backend "numa" known to torch.distributed; the rest of numadist is imported when a group is made."""

import sys
from typing import Any

from numadist.binding import warn_if_narrowed
from numadist.comm import BACKEND
from numadist.config import config
from numadist.log import get_logger

log = get_logger(__name__)


def create_process_group(options: Any, backend_options: Any) -> Any:
    """torch's creator function. The import is late so that `import torch` stays cheap."""
    from numadist.comm.connect import create

    return create(options, backend_options)


def autoload() -> None:
    """Entry point `torch.backends`: runs at the end of `import torch`, in every program that has us."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, BACKEND.upper()):
        return
    # torch iterates over `devices`, so a plain string would be taken letter by letter.
    dist.Backend.register_backend(BACKEND, create_process_group, extended_api=True, devices=["cpu"])
    # torch 2.15 would attach its flight recorder, which finds no C++ backend in our groups and raises.
    getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).add(BACKEND)
    if config().cpus:
        warn_if_narrowed(config().cpus)
    if config().backend == BACKEND:
        stand_in_for_gloo()
    if config().job_id:
        meet_as_numarun_says()


def stand_in_for_gloo() -> None:
    """Give every group that asks for gloo, or for torch's default on CPUs, the backend numa instead.

    get_backend() still says what the script asked for, so its own checks hold.
    """
    from torch.distributed import distributed_c10d as c10d

    asked_for = c10d.BackendConfig.get_device_backend_map

    def device_backend_map(self: c10d.BackendConfig) -> dict[str, c10d.Backend]:
        numa = c10d.Backend(BACKEND)
        return {
            device: numa if name == c10d.Backend.GLOO else name for device, name in asked_for(self).items()
        }

    c10d.BackendConfig.get_device_backend_map = device_backend_map  # type: ignore[method-assign]
    log.info("backend numa stands in for gloo (NUMADIST_BACKEND)")


def meet_as_numarun_says() -> None:
    """What a rank of numarun does where torchrun's would connect to the agent's store.

    On one machine it opens a file: clients of torch's TCPStore ask a name server for the name of 127.0.0.1, and numarun
    would need a process with torch in it to serve one. On several it leaves its machine's number in the store, so that
    numarun can tell who has not come. A port that is not numarun's is left to torch.
    """
    from torch.distributed import FileStore

    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]  # the package's attribute is the function
    over_tcp = rendezvous._create_c10d_store
    port, _, path = config().store.partition(":")

    def create_store(host: str, port_asked: int, rank: int, world_size: int, timeout: Any, *rest: Any) -> Any:
        agents = rendezvous._torchelastic_use_agent_store()
        if agents and str(port_asked) == port:
            store = FileStore(path)
            store.set_timeout(timeout)
            return store
        store = over_tcp(host, port_asked, rank, world_size, timeout, *rest)
        if agents and config().machine:
            store.set(f"numarun/machine/{config().machine}", "")
        return store

    rendezvous._create_c10d_store = create_store
