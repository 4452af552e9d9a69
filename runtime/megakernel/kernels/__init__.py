"""Kernels of a decode step as one persistent launch.

A step is a list of passes, such as the matmul of one matrix (`opcodes.py`). In each program, copy
warps load the tiles of weights, K and V that its passes read into a ring in shared memory, ahead of
their use (`ring.py`). The compute warps run the passes (`step.py`). Programs exchange activations
through flagged messages (`messages.py`): a value and the flag of its stage, packed into one word
and stored at once, as in NCCL's LL protocol. A reader polls a message until its flag matches, so
there is no grid barrier and no fence. A message is overwritten two stages later at the earliest. By
then every reader has sent the results that it computed from the message.

Tensor cores multiply tiles of weights by bf16 inputs of up to eight sequences; each of the eight
compute warps multiplies an eighth of a tile. Accumulators and the residual stream are fp32.
"""
