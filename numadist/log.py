"""Named loggers. The library installs no handler; the application or the launcher decides."""

import logging


def get_logger(name: str) -> logging.Logger:
    """Logger `numadist.<module>`; silent below WARNING until the application configures logging."""
    return logging.getLogger(name)


logging.getLogger("numadist").addHandler(logging.NullHandler())
