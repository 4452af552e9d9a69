"""HTML reports of runs, sweeps and comparisons.

Each report is a single self-contained file without scripts or external resources.
"""

from loadgen.report.compare import compare_page
from loadgen.report.document import Section, Table, document_page
from loadgen.report.page import write_page
from loadgen.report.run import run_page
from loadgen.report.sweep import sweep_page

__all__ = [
    "Section",
    "Table",
    "compare_page",
    "document_page",
    "run_page",
    "sweep_page",
    "write_page",
]
