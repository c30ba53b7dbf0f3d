"""The console that all commands print to."""

from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from stretto.base.redact import without_secrets


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Raise BrokenPipeError again, so that `main` returns 141; rich would exit with 1."""
        raise

    def render_str(self, text: str, *arguments: Any, **options: Any) -> Text:  # noqa: ANN401 - rich passes them on
        """Leave out the secrets of URLs: all strings come through here, also those in tables."""
        return super().render_str(without_secrets(text), *arguments, **options)


def make_console(*, is_quiet: bool = False, is_wrapped: bool = False) -> Console:
    """Return a console that fits tables to the terminal's width, and wraps other text only if `is_wrapped`."""
    return _Console(highlight=False, markup=False, soft_wrap=not is_wrapped, quiet=is_quiet)
