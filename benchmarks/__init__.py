"""What the README's numbers come from: harnesses that print tables, and acceptance scripts that exit non-zero."""
