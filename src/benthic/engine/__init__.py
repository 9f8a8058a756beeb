"""The engine: the scheduler that decides, the loop that acts, the process around it, and `LLM` for offline use."""
