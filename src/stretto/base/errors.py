"""The errors a user can mend, each one sentence: the field, the value, the remedy."""


class StrettoError(Exception):
    """A mistake that its reader can mend; the command prints it as one line and exits with code 2."""


class ConfigError(StrettoError):
    """What was asked for can't be meant, or can't be done together."""


class DataError(StrettoError):
    """What was to be read is missing, broken, or too small for what was asked."""


class LawError(StrettoError):
    """A block doesn't keep one of the laws that the engines rely on."""


class DivergedError(StrettoError):
    """The numbers of a run went bad: a loss or a gradient that is no longer finite."""
