"""Drafters: what proposes the K tokens that the next step verifies. A bad draft costs time, never correctness."""
