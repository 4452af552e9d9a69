"""HTTP interface: OpenAI's API and Anthropic's Messages API."""
