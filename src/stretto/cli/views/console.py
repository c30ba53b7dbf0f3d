"""Console: where the commands print, in one way."""

from typing import NoReturn

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Leave it to the command, which knows its exit code; rich would exit with 1."""
        raise


def make_console(*, is_quiet: bool = False, is_wrapped: bool = False) -> Console:
    """Return a console that prints text as it is; only tables and what `is_wrapped` are cut to the terminal's width."""
    return _Console(highlight=False, markup=False, soft_wrap=not is_wrapped, quiet=is_quiet)
