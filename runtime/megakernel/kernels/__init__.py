"""One decode step of a few sequences as one launch, at the speed at which memory gives weights.

A step is a list of passes (`passes.py`). Some warps of each program copy what its passes read of
weights, K and V into a ring of tiles, ahead of their use (`ring.py`); the others compute
(`kernel.py`). Programs tell one another what they found in words: a number and the stage that it
is of, stored and read as one (`words.py`). Whoever needs a word reads it until it is there: no
barrier, no fence. A place is written again two stages later at the earliest, when all that read it
have told what they made of it.

Tensor cores multiply a tile, each warp an eighth of it, by inputs in bf16; up to eight sequences
are as many products as one. Sums and the residual stream are fp32.
"""
