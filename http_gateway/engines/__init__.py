"""The engines behind the gateway: their channels, their health, and the choice of one for a request."""
