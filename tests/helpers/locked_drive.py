"""A filesystem of fsspec for URLs like `drive://user:password@host/path`: the local disk, behind a password."""

from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem


class LockedDrive(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """Files of the local disk, for those who know a password."""

    protocol = "drive"
    passwords: frozenset[str] = frozenset()  # that are accepted now

    def __init__(self, password: str = "", **options: object) -> None:
        super().__init__(auto_mkdir=True, **options)
        self.password = password

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:  # noqa: ANN401
        text = str(path)
        return LocalFileSystem._strip_protocol(urlsplit(text).path if text.startswith("drive://") else text)

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        return {"password": unquote(urlsplit(path).password or "")}

    def _check(self) -> None:
        if self.password not in self.passwords:
            raise PermissionError("wrong password")

    def info(self, path: Any, **options: object) -> Any:  # noqa: ANN401
        self._check()
        return super().info(path, **options)

    def _open(self, path: str, mode: str = "rb", **options: object) -> Any:  # noqa: ANN401
        self._check()
        return super()._open(path, mode, **options)


fsspec.register_implementation("drive", LockedDrive, clobber=True)
