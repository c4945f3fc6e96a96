"""Every exception numadist raises to a user, one tree."""


class NumadistError(Exception):
    """Base of all numadist errors: `except NumadistError` catches whatever we raise on purpose."""


class ConfigError(NumadistError):
    """A NUMADIST_* variable or an option has an unknown name or an impossible value."""


class TopologyError(NumadistError):
    """The machine description cannot be read or contradicts itself."""


class BindError(NumadistError):
    """CPUs or memory could not be bound as asked; the message says what the kernel kept."""


class PlacementError(NumadistError):
    """The asked ranks do not fit the machine, or pages are not where they must be."""


class ShardError(NumadistError):
    """A model cannot be captured, planned or loaded for this number of ranks."""


class GenerateError(NumadistError):
    """A model or a request that generation cannot serve, or a generation that was stopped."""


class TokenIdError(GenerateError, IndexError):
    """A prompt has a token id outside the model's vocabulary; an IndexError, as the model itself raises."""


class PlanError(NumadistError):
    """A plan that cannot be read or does not fit, or a phase switch at a wrong time."""


class CommError(NumadistError, RuntimeError):
    """Base of what a collective may raise; a RuntimeError, as other backends raise, for programs that catch that."""


class CollectiveTimeout(CommError):
    """A peer is alive but did not arrive before the deadline."""


class CollectiveMismatch(CommError):
    """Ranks called different operations, sizes, dtypes or roots; both sides are named."""


class PeerLost(CommError):
    """A peer process of the group died."""


class NativeError(NumadistError):
    """The native core is missing, has another ABI, or a system call failed unexpectedly."""
