"""Tokenizers, chat templates, conversations, and parsers of reasoning and tool calls."""
