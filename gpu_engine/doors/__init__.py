"""Services that the public port may have in addition to the engine's own, each in a package that can be left out.

A package here has a module `door`, which implements `found.Door`; it imports what the service needs when the service is
added. Another distribution adds a door by an entry point in the group `lockstep.doors`. A door adds its service to the
`Services` of the port (`front/port/later_services.py`), which is no server: the port has started already. A door uses
the rooms below it as the engine's own service does: it turns its messages into requests of our own proto, and its
requests take the same checks and the same path (`front/validation.py`, `front/calls.py`). No room below imports a door,
and the server finds them by name.
"""
