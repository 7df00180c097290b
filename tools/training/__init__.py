"""What it takes to train a drafter: prompts, the target's answers, its hidden states, and updates of a head."""
