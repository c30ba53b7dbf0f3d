"""find_secret: the secret that the ranks of a run share, to sign their messages in the key-value store.

It is in STRETTO_SECRET, which our launcher sets for the ranks that it starts; under another launcher, the user may set
it on all nodes. Otherwise it is in a file in a folder that all nodes share, which rank 0 creates. Without such a folder
there is no secret: anyone who can connect to the store can then write messages that look like a rank's.
"""

import errno
import os
import secrets
import stat
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from stretto.base.disk import explain_write_errors
from stretto.base.errors import ConfigError, LostPeerError
from stretto.mesh.timeouts import poll

SECRET_VARIABLE = "STRETTO_SECRET"
SECRET_FILE = "secret"
_MIN_LENGTH = 16
_FILE_LENGTH = 64  # 256 bits in hexadecimal


def new_secret() -> str:
    """Return a new random secret."""
    return secrets.token_hex(_FILE_LENGTH // 2)


def find_secret(variables: Mapping[str, str], folder: Path | None, rank: int, timeout: timedelta) -> bytes | None:
    """Return the secret in STRETTO_SECRET, or else in a file in `folder`, which rank 0 creates; None without either."""
    secret = variables.get(SECRET_VARIABLE, "")
    if 0 < len(secret) < _MIN_LENGTH:
        raise ConfigError(
            f"{SECRET_VARIABLE} has {len(secret)} characters, so it can be guessed; set it to at least {_MIN_LENGTH} "
            "random characters, the same on all nodes (openssl rand -hex 32)"
        )
    if secret:
        return os.fsencode(secret)
    return None if folder is None else _find_in_file(folder / SECRET_FILE, rank, timeout.total_seconds())


def _find_in_file(path: Path, rank: int, seconds: float) -> bytes:
    if rank == 0:
        _create_file(path)
    content = b""

    def is_complete() -> bool:
        nonlocal content
        content = _read_file(path)
        return len(content) == _FILE_LENGTH

    if not poll(is_complete, seconds, max_pause=0.5):
        raise LostPeerError(
            f"rank {rank} found no secret in {path} within {seconds:.0f} s, although rank 0 creates it; check rank 0's "
            f"output, choose a folder that all nodes share, or set {SECRET_VARIABLE} on all nodes"
        )
    return content


def _create_file(path: Path) -> None:
    """Create the file, which only its owner can read, unless it exists."""
    with explain_write_errors(path, f"choose a different folder, or set {SECRET_VARIABLE} on all nodes"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # O_EXCL follows no link, and if two launches start at the same time, both use the file of the first.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(new_secret())
        except OSError:  # such as a full disk
            path.unlink()
            raise


def _read_file(path: Path) -> bytes:
    """Return what rank 0 has written so far; raise if anyone but the user who started the run can read or write it."""
    try:
        # With O_NONBLOCK, opening a pipe that someone has put there does not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return b""
    except OSError as error:
        reason = "is a symbolic link" if error.errno == errno.ELOOP else f"can't be read ({error.strerror})"
        raise _refusal(path, reason) from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refusal(path, "is not a file")
        if status.st_uid != os.geteuid():
            raise _refusal(path, f"belongs to user {status.st_uid}, not to user {os.geteuid()}")
        if status.st_mode & 0o077:
            raise _refusal(path, f"has permissions {stat.S_IMODE(status.st_mode):o}, not 600")
        return file.read(_FILE_LENGTH)


def _refusal(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} holds the ranks' secret, so only you may have access to it, but it {reason}; delete it, or set "
        f"{SECRET_VARIABLE} on all nodes"
    )
