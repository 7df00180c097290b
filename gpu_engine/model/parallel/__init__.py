"""One model over several processes, its ranks: each holds a part of every layer and of the vocabulary (tensor
parallelism). Rank 0 is the engine process; the other ranks run the forwards that it announces, and know no request.
"""
