"""Which strings a JSON Schema allows: the dialect of patterns, and the patterns of formats and of dates."""
