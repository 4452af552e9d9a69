"""Parsers of the output of chats: reasoning, content and tool calls."""
