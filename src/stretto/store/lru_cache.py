"""LruCache: a small in-memory cache that is pickled without its values."""

from collections.abc import Callable, Hashable
from dataclasses import field
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LruCache(Generic[T]):
    """Holds at most `size` values and evicts the least recently used one. Pickling leaves the values out."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[Hashable, T] = {}

    def __reduce__(self) -> tuple[type["LruCache[T]"], tuple[int]]:
        return type(self), (self._size,)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value for `key`; if it is not cached, call `make` and cache the result."""
        value = self._values.pop(key) if key in self._values else make()
        self._values[key] = value
        if len(self._values) > self._size:
            del self._values[next(iter(self._values))]
        return value


def lru_cache_field(size: int) -> Any:  # noqa: ANN401 - as dataclasses.field
    """Return a dataclass field that holds an `LruCache`; repr and comparison ignore it."""
    return field(default_factory=lambda: LruCache(size), init=False, repr=False, compare=False)
