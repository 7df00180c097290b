"""Other serving systems on the same prompts: in this process, in an environment of their own, or over HTTP."""
