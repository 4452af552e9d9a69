"""KV transfer between prefill and decode workers: slabs, frames, leases, credits, NIXL."""
