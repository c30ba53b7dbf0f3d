"""LruCache: what was worked out last, so that it need not be worked out again; never more than a few of it."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class LruCache(Generic[T]):
    """A few values by key; the one that was asked for longest ago goes first. Pickled, it is empty."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[Hashable, T] = {}

    def __reduce__(self) -> tuple[type["LruCache[T]"], tuple[int]]:
        return type(self), (self._size,)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key, made now if it isn't there."""
        value = self._values.pop(key) if key in self._values else make()
        self._values[key] = value
        if len(self._values) > self._size:
            del self._values[next(iter(self._values))]
        return value
