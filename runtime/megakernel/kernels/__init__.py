"""Kernels of a decode step as one persistent launch.

A step is a list of passes (`opcodes.py`). In each program, copy warps load the tiles of weights, K
and V that its passes read into a ring in shared memory, ahead of their use (`ring.py`). The other
warps compute (`step.py`). Programs exchange activations through flagged messages (`messages.py`): a
value and the flag of its stage, packed into one word and stored at once, as in NCCL's LL protocol.
A reader polls a message until its flag matches, so there is no grid barrier and no fence. A message
is overwritten two stages later at the earliest, when every reader has sent what it computed from
it.

Tensor cores multiply a tile, an eighth of it in each warp, by inputs in bf16. A product has room
for eight sequences. Sums and the residual stream are fp32.
"""
