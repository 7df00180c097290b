"""Extensions: what a server has for some deployments only, each on the hooks of `found.Extension`.

A package here is an extension; a server without it starts and serves everything else.
"""
