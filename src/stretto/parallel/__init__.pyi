from stretto.parallel.layout import Layout as Layout
from stretto.parallel.module import layouts as layouts

__all__: list[str]
