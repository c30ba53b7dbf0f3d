"""The errors that stretto reports to the user. A message is one sentence: the parameter, its value, the remedy."""

from stretto.base.redact import without_secrets


class StrettoError(Exception):
    """An error with a message for the user; the `stretto` command prints it on one line and exits with `exit_code`."""

    exit_code = 2
    ends_all_ranks = False  # whether every rank ends with this error at the same step, so that none waits for another

    def __init__(self, message: object = "") -> None:
        # Here, since messages are printed, logged, sent to trackers, and shared.
        super().__init__(without_secrets(str(message)))


class ConfigError(StrettoError):
    """A parameter or block is invalid or conflicts with another, or a file or package that is needed can't be used."""


class PlanError(StrettoError):
    """No plan is possible: the layout does not fit the model or the cluster, or a profile is missing or invalid."""


class MeshError(StrettoError):
    """The number of ranks does not match the layout, the launcher's variables are invalid, or ranks can't connect."""


class LostPeerError(MeshError):
    """A rank was lost, does not answer or makes no progress. The input is not at fault, so the run can be restarted."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again


class DataError(StrettoError):
    """Data or a checkpoint is missing or damaged, or can't be read, written or prepared as requested."""


class LawError(StrettoError):
    """A block or loss violates a law that the engines rely on, such as the chunk law."""


class FencedError(StrettoError):
    """Another launch of this run has taken over its folder, so this one must not be restarted."""

    exit_code = 76  # not 75, after which scripts restart a run


class DivergedError(StrettoError):
    """Training diverged: a loss, gradient or saved tensor is not finite."""


class SavedInterrupt(KeyboardInterrupt):
    """Ctrl-C, after which all ranks have taken the same last step and saved it, so that none waits for another."""


# A rank that raises one of these publishes it, and the other ranks end with the same error. Others are not published: a
# MeshError is raised on every rank or is about a connection.
SHARED_ERRORS: tuple[type[StrettoError], ...] = (
    ConfigError,
    DataError,
    DivergedError,
    FencedError,
    LawError,
    PlanError,
)
