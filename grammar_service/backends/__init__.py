"""The room of the matcher libraries: one package for each library, and `json_schema` for what both read alike.

`backend` defines the protocols that the other rooms use, `registry` finds and loads an implementation by its name.
Importing this package imports no library.
"""
