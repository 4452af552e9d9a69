"""The experiments of the DeInfer paper: ``python -m runtime.offline.bench tp --paper --help``.

`paper` has the paper's numbers, `cases` what is measured, `passes` how, `tables` the tables, and
`plot` draws the result.
"""
