"""LruCache: the last few results of a computation, in memory."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class LruCache(Generic[T]):
    """At most `size` values by key; the least recently used one goes first. It is pickled empty."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[Hashable, T] = {}

    def __reduce__(self) -> tuple[type["LruCache[T]"], tuple[int]]:
        return type(self), (self._size,)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key; call `make` if it is not cached."""
        value = self._values.pop(key) if key in self._values else make()
        self._values[key] = value
        if len(self._values) > self._size:
            del self._values[next(iter(self._values))]
        return value
