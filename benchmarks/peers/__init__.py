"""Other serving systems on the same prompts: transformers in this process, vLLM in an environment of its own."""
