"""How fast the runtime is: ``python -m runtime.bench engine|step|decode|prefill|plan|host --help``.

Each table has a figure, its floor by what the device was seen to do in the same run, and peers with
the same weights. On a GPU weights are random, at real shapes.
"""
