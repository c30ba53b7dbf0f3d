"""stretto trains recurrent networks across many GPUs: over replicas, layers and time, without changing the result.

Names are imported on first use, so `import stretto` is fast and does not import torch.
"""

from stretto.base.lazy import lazy_exports

__version__ = "0.1.0.dev0"
__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
