"""The sharding compiler. `numadist.shard(model, example_inputs)` is this package called as a function.

The package and its main function share one name, so the module is callable; type checkers may prefer
`from numadist.pipeline.shard import shard`.
"""

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from numadist.pipeline.shard import shard

        return shard(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
