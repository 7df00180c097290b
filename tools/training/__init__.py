"""Trains an EAGLE3 head (prompts, the target's answers to them, its hidden states, updates of the head), and adapters.

`prompts` (word lists in `subjects`) and `answers` are programs that write a file each. `train_eagle3` is the program
that trains: `features` collects hidden states, `unroll` runs the head over a whole answer, `trainer` makes one update,
and `evaluate` replays held-back answers. `train_adapter` is a program by itself: it trains a small adapter.
"""
