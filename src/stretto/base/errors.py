"""The errors that a user can fix. Each message is one sentence: the parameter, its value, the remedy."""


class StrettoError(Exception):
    """An error that the user can fix; the command prints it on one line and exits with code 2."""

    exit_code = 2


class ConfigError(StrettoError):
    """A parameter is invalid, or does not go together with another."""


class PlanError(StrettoError):
    """There is no plan: the layout needs more than the model or the cluster has."""


class MeshError(StrettoError):
    """The started ranks do not fit the layout, or they cannot connect."""


class LostPeerError(MeshError):
    """A rank was lost. The input is not at fault, so the run can be restarted."""

    exit_code = 75


class DataError(StrettoError):
    """The data is missing, damaged, or too small."""


class LawError(StrettoError):
    """A block or loss violates a law that the engines rely on."""


class FencedError(StrettoError):
    """Another run has taken over this one's folder; restarting it makes no sense."""

    exit_code = 76


class DivergedError(StrettoError):
    """Training diverged: a loss or gradient is not finite."""
