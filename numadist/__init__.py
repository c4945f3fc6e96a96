"""numadist: run PyTorch on multi-socket CPU servers, one rank per NUMA node.

Public names are loaded on first use: `import numadist` imports neither torch nor numpy, so the launcher
and the command line start in milliseconds.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> module that defines it.
_PUBLIC = {
    "NumadistError": "numadist.errors",
    "ConfigError": "numadist.errors",
    "TopologyError": "numadist.errors",
    "BindError": "numadist.errors",
    "PlacementError": "numadist.errors",
    "ShardError": "numadist.errors",
    "GenerateError": "numadist.errors",
    "PlanError": "numadist.errors",
    "CommError": "numadist.errors",
    "CollectiveTimeout": "numadist.errors",
    "CollectiveMismatch": "numadist.errors",
    "PeerLost": "numadist.errors",
    "NativeError": "numadist.errors",
    "clone": "numadist.memory.tensors",
    "patch_clone": "numadist.memory.tensors",
    "page_nodes": "numadist.memory.pages",
    "empty_parameters": "numadist.shard.fake",
    "explain": "numadist.shard.explain",
    "Schema": "numadist.shard.schema",
    "PlanPair": "numadist.plan.plan",
    "phase": "numadist.plan.phase",
    "current_phase": "numadist.plan.phase",
    "phase_stats": "numadist.plan.phase",
    "Generator": "numadist.generate.api",
}

# Packages that are callable.
_CALLABLE = ("generate", "shard")

__all__ = ["__version__", *sorted([*_PUBLIC, *_CALLABLE])]


def __getattr__(name: str) -> Any:
    if name in _CALLABLE:
        return importlib.import_module(f"numadist.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'numadist' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
