"""What clients ask about tokens: the calls Tokenize and Detokenize. Runs on the event loop."""
