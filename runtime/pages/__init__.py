"""Pages of KV: which ones a sequence needs, and pools of them. It has no tensor code.

Workers, routers, transfers and sizing count pages with `runtime.pages.plan`, so that two processes
cannot count them differently.
"""
