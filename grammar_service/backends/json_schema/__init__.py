"""What both backends read alike in a JSON Schema: patterns, dates, exclusive branches, misspelled keywords.

It also holds the list of parts that a backend would not enforce. It imports no matcher library.
"""
