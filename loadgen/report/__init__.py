"""Reports: a page of HTML for a run, for a sweep, and for two of them side by side.

Each page is one file that needs nothing else, neither scripts nor anything from elsewhere.
"""

from loadgen.report.compare import compare_page
from loadgen.report.page import write_page
from loadgen.report.run import run_page
from loadgen.report.sweep import sweep_page

__all__ = ["compare_page", "run_page", "sweep_page", "write_page"]
