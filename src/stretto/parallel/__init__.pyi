from stretto.parallel.layout import Layout as Layout
from stretto.parallel.module import layouts as layouts
from stretto.parallel.stack import Stack as Stack
from stretto.parallel.verify import Comparison as Comparison

__all__: list[str]
