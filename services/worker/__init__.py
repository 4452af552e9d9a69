"""Code that prefill and decode workers share: loading, engine thread, lifecycle, registration."""
