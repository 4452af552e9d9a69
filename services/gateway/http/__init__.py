"""OpenAI's HTTP API."""
