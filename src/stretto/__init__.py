"""stretto trains recurrent networks across many GPUs, exactly: over replicas, over layers, and over time.

Names are imported when they are first used, so `import stretto` is fast and does not import torch. `__init__.pyi` lists
them; type checkers read it too.
"""

from stretto.base.lazy import lazy_exports

__version__ = "0.1.0.dev0"
__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
