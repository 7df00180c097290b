"""What a feature of a request costs: the same requests with it and without, in turn on one server."""
