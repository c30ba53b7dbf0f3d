"""The errors a user can mend, each one sentence: the field, the value, the remedy."""


class StrettoError(Exception):
    """A mistake that its reader can mend; the command prints it as one line and exits with code 2."""

    exit_code = 2


class ConfigError(StrettoError):
    """What was asked for can't be meant, or can't be done together."""


class PlanError(StrettoError):
    """No plan can be made: the layout asks for more than the model or the world has."""


class MeshError(StrettoError):
    """The ranks are not those that were asked for, or one of them was lost."""


class LostPeerError(MeshError):
    """A rank went away; nothing is wrong with what was asked, so it is worth another try."""

    exit_code = 75


class DataError(StrettoError):
    """What was to be read is missing, broken, or too small for what was asked."""


class LawError(StrettoError):
    """A block doesn't keep one of the laws that the engines rely on."""


class FencedError(StrettoError):
    """This run was cut off, and another went on in its place; there is nothing to start again."""

    exit_code = 76


class DivergedError(StrettoError):
    """The numbers of a run went bad: a loss or a gradient that is no longer finite."""
