"""Models that are read from their files tensor by tensor, each into the form in which it is used."""
