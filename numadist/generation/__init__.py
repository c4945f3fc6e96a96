"""Generation with a sharded KV cache. `numadist.generate(model, input_ids, ...)` is this package called as a function.

The package and its main function share one name, as `numadist.shard` does.
"""

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from numadist.generation.generator import generate

        return generate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
