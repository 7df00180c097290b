"""The command line `lockstep`: its commands, their flags, and the terminal. The top room; no other room imports it."""
