"""`numadist explain MODEL`: how a model would be sharded, without starting a rank."""

import argparse
import importlib
from collections.abc import Sequence

import torch

from numadist import models
from numadist.errors import ShardError
from numadist.shard.explain import explain


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="numadist explain", description=__doc__)
    parser.add_argument(
        "model", help=f"{', '.join(models.NAMES)}, or module:function that returns (model, inputs)"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128)
    options = parser.parse_args(argv)
    model, inputs = _model_and_inputs(options)
    print(explain(model, inputs, options.ranks))
    return 0


def _model_and_inputs(options: argparse.Namespace) -> tuple[torch.nn.Module, object]:
    if ":" in options.model:
        module, _, function = options.model.partition(":")
        try:
            return getattr(importlib.import_module(module), function)()
        except (ImportError, AttributeError) as error:
            raise ShardError(f"cannot load {options.model}: {error}; expected module:function") from error
    model = models.build(options.model)
    tokens = torch.zeros(options.batch, options.seq, dtype=torch.long)
    return model, {"input_ids": tokens, "use_cache": False, "logits_to_keep": 1}
