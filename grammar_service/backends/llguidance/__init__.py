"""The llguidance backend: it computes masks while an answer is generated, so compiling is cheap.
It never loads torch."""
