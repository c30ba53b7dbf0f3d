"""With this folder on PYTHONPATH, every Python process says on stderr when it has sent its first message of a region.

It works in whatever way a process is started: by torchrun, by Lightning, by `mp.spawn`.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType

MODULE = "stretto.parallel.messages"


class NoticingLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        send = module.Messages.all_to_all
        has_sent = False

        def notice(*arguments: object) -> object:
            nonlocal has_sent
            received = send(*arguments)
            if not has_sent:
                sys.stderr.write("sent messages\n")
            has_sent = True
            return received

        module.Messages.all_to_all = notice


class NoticingFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.origin is not None
        spec.loader = NoticingLoader(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, NoticingFinder())
