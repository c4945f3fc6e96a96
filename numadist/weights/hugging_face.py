"""transformers, which the extra `models` brings."""

import importlib
import importlib.util
from typing import Any

from numadist.errors import NumadistError


def quiet_transformers(error: type[NumadistError] = NumadistError) -> Any:
    """The package, without its progress bars and warnings. Raises: `error` where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise error("models need the extra: pip install 'numadist[models]'")
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
