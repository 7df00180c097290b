"""The xgrammar backend: compiling is expensive and masks are cheap.
The only package of the sidecar that loads torch."""
