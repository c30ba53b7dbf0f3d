"""`python -m stretto` is the command `stretto`."""

import os
import sys

# `python -m` puts the current folder first, where a file such as `argparse.py` would replace the module of that name.
# So import nothing before this but what Python has imported at its start.
if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109
    del sys.path[0]

from stretto.cli.main import entry

entry()
