"""Other serving systems on the same prompts: in this process, in their own environment, or over HTTP."""
