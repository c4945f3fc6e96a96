"""numadist: run PyTorch on multi-socket CPU servers, one rank per NUMA node.

Everything public is a name here. Names are loaded on first use: `import numadist` imports neither torch nor numpy, so
the launcher and the command line start in milliseconds. Type checkers and editors read the imports below.
"""

import importlib
from typing import TYPE_CHECKING, Any

from numadist.errors import (
    BindError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommError,
    ConfigError,
    GenerateError,
    NativeError,
    NumadistError,
    PeerLost,
    PlacementError,
    PlanError,
    ShardError,
    TokenIdError,
    TopologyError,
)

if TYPE_CHECKING:
    from numadist import models
    from numadist.comm.registry import CommStats
    from numadist.comm.registry import stats as comm_stats
    from numadist.compare.unsharded import UnshardedProcess
    from numadist.compare.worker import Answer
    from numadist.costmodel.profile import MachineProfile
    from numadist.generation.engine import Engine, Policy, Request
    from numadist.generation.generator import Generator, generate
    from numadist.generation.sampling import Sampling
    from numadist.memory.pages import num_pages, page_nodes
    from numadist.memory.tensors import clone, patch_clone
    from numadist.phases.phase import (
        Phase,
        PhaseStats,
        current_phase,
        phase,
        phase_stats,
        switch_phase,
        use_plan,
    )
    from numadist.phases.plan import PhasePlan, PlanPair, RankPlan
    from numadist.pipeline.explain import explain
    from numadist.pipeline.gradients import clip_grad_norm_
    from numadist.pipeline.optimizers import load_optimizer_state_dict, optimizer_state_dict
    from numadist.pipeline.plan import plan
    from numadist.pipeline.shard import shard
    from numadist.pipeline.sharded_model import ShardedModel
    from numadist.sharding.schema import Schema
    from numadist.weights.fake import empty_parameters

__version__ = "0.1.0"

# Public name -> where it is defined, `module:name`; the same as the imports above, which a test compares.
_LAZY = {
    "models": "numadist.models",
    "CommStats": "numadist.comm.registry:CommStats",
    "comm_stats": "numadist.comm.registry:stats",
    "UnshardedProcess": "numadist.compare.unsharded:UnshardedProcess",
    "Answer": "numadist.compare.worker:Answer",
    "MachineProfile": "numadist.costmodel.profile:MachineProfile",
    "Engine": "numadist.generation.engine:Engine",
    "Policy": "numadist.generation.engine:Policy",
    "Request": "numadist.generation.engine:Request",
    "Generator": "numadist.generation.generator:Generator",
    "generate": "numadist.generation.generator:generate",
    "Sampling": "numadist.generation.sampling:Sampling",
    "num_pages": "numadist.memory.pages:num_pages",
    "page_nodes": "numadist.memory.pages:page_nodes",
    "clone": "numadist.memory.tensors:clone",
    "patch_clone": "numadist.memory.tensors:patch_clone",
    "Phase": "numadist.phases.phase:Phase",
    "PhaseStats": "numadist.phases.phase:PhaseStats",
    "current_phase": "numadist.phases.phase:current_phase",
    "phase": "numadist.phases.phase:phase",
    "phase_stats": "numadist.phases.phase:phase_stats",
    "switch_phase": "numadist.phases.phase:switch_phase",
    "use_plan": "numadist.phases.phase:use_plan",
    "PhasePlan": "numadist.phases.plan:PhasePlan",
    "PlanPair": "numadist.phases.plan:PlanPair",
    "RankPlan": "numadist.phases.plan:RankPlan",
    "explain": "numadist.pipeline.explain:explain",
    "clip_grad_norm_": "numadist.pipeline.gradients:clip_grad_norm_",
    "load_optimizer_state_dict": "numadist.pipeline.optimizers:load_optimizer_state_dict",
    "optimizer_state_dict": "numadist.pipeline.optimizers:optimizer_state_dict",
    "plan": "numadist.pipeline.plan:plan",
    "ShardedModel": "numadist.pipeline.sharded_model:ShardedModel",
    "shard": "numadist.pipeline.shard:shard",
    "Schema": "numadist.sharding.schema:Schema",
    "empty_parameters": "numadist.weights.fake:empty_parameters",
}

__all__ = [
    "Answer",
    "BindError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "CommError",
    "CommStats",
    "ConfigError",
    "Engine",
    "GenerateError",
    "Generator",
    "MachineProfile",
    "NativeError",
    "NumadistError",
    "PeerLost",
    "Phase",
    "PhasePlan",
    "PhaseStats",
    "PlacementError",
    "PlanError",
    "PlanPair",
    "Policy",
    "RankPlan",
    "Request",
    "Sampling",
    "Schema",
    "ShardError",
    "ShardedModel",
    "TokenIdError",
    "TopologyError",
    "UnshardedProcess",
    "__version__",
    "clip_grad_norm_",
    "clone",
    "comm_stats",
    "current_phase",
    "empty_parameters",
    "explain",
    "generate",
    "load_optimizer_state_dict",
    "models",
    "num_pages",
    "optimizer_state_dict",
    "page_nodes",
    "patch_clone",
    "phase",
    "phase_stats",
    "plan",
    "shard",
    "switch_phase",
    "use_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'numadist' has no attribute {name!r}")
    module, _, attribute = _LAZY[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return __all__
