"""KV transfer between a prefill and a decode worker: slabs, frames, leases, credits, NIXL."""
