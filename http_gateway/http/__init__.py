"""The HTTP side: routes, connections, API keys, limits of bodies, metrics, and the server itself."""
