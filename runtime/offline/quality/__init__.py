"""Quality of compressed KV formats against exact bf16 KV; see README.md."""
