"""Planning past one machine: how much memory an engine needs, how long its step takes, and how many engines a load
needs.

`python -m tools.scale --help` lists the commands. Two kinds of numbers are kept apart: formulas over a model's shape
and a
device's limits (shape, memory, device, step_time), and a simulation of a fleet (fleet, replica, routers, traces, plan)
whose engines run the real scheduler over a step time that is either such a formula or a fit to a real engine
(calibration).
`comparison` holds the formulas against every figure that the project has measured.

Not responsible for: serving. No server imports this.
"""
