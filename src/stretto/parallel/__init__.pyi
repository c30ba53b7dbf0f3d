from stretto.parallel.layout import Layout as Layout

__all__: list[str]
