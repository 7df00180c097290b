"""What clients ask about tokens: Tokenize, Detokenize, and log-probabilities by field. Runs on the event loop."""
