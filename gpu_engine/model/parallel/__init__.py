"""One model over several processes, its ranks. Tensor parallelism: each holds a part of every layer and of the
vocabulary; rank 0 is the engine process, and the others run the forwards that it announces, and know no request.
Data-parallel attention: each rank is an engine with requests of its own, and holds some experts of every mixture.
"""
