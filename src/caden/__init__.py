"""CADEN and its relatives: agents on a graph train one model together without a server.

The public names are in `__init__.pyi`. Each is imported when it is first used, so that `import caden` and the command
line's help do not wait for torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
