"""Make backend "numa" known to torch.distributed; the rest of numadist is imported when a group is made."""

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
    if config().cpus:
        warn_if_narrowed(config().cpus)
    if config().backend == BACKEND:
        stand_in_for_gloo()


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
