"""Correctness: equal token ids, valid answers, correct masks, answers that end within max_tokens, accepted drafts."""
