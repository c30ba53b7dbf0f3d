"""The console that all commands print to."""

from typing import NoReturn

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Raise BrokenPipeError again, so that `main` returns 141; rich would exit with 1."""
        raise


def make_console(*, is_quiet: bool = False, is_wrapped: bool = False) -> Console:
    """Return a console that fits tables to the terminal's width, and wraps other text only if `is_wrapped`."""
    return _Console(highlight=False, markup=False, soft_wrap=not is_wrapped, quiet=is_quiet)
