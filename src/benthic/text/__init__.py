"""Tokens to text: bytes of tokens, incremental UTF-8, stop strings, and the tokenizer as server and `LLM` use it."""
