"""Make backend "numa" known to torch.distributed; the rest of numadist is imported when a group is made."""

from typing import Any

BACKEND = "numa"


def create_process_group(options: Any, backend_options: Any) -> Any:
    """torch's creator function. The import is late so that `import torch` stays cheap."""
    from numadist.comm.process_group import create

    return create(options, backend_options)


def autoload() -> None:
    """Entry point `torch.backends`: runs at the end of `import torch`, in every program that has us."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, BACKEND.upper()):
        return
    # torch iterates over `devices`, so a plain string would be taken letter by letter.
    dist.Backend.register_backend(BACKEND, create_process_group, extended_api=True, devices=["cpu"])
