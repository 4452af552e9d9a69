# mypy: allow-untyped-defs, allow-untyped-decorators
"""PTX that waits for flagged messages: a 32-bit word and a 32-bit flag, stored together as 64 bits.

This is NCCL's LL protocol. An aligned store of 8 bytes is not torn.
"""

from triton.experimental.gluon import constexpr_function


@constexpr_function
def poll_words_asm(count, system):
    """Return PTX that polls ``count`` messages per thread until all flags match.

    ``system``: whether other GPUs may write the messages.

    Operands: the outputs $0 … are the words. The inputs are, for each message, one address, then
    one flag, then one mask.
    """
    scope = "sys" if system else "gpu"
    lines = []
    for n in range(count):
        lines += [f"mov.b32 ${n}, 0;", f"setp.ne.b32 wanted{n}, ${3 * count + n}, 0;"]
    lines.append("AGAIN:")
    for n in range(count):
        lines.append(f"mov.b64 word{n}, {{${n}, ${2 * count}}};")
        lines.append(f"@wanted{n} ld.relaxed.{scope}.global.b64 word{n}, [${count + n}];")
    lines.append("mov.b32 other, 0;")
    for n in range(count):
        lines.append(f"mov.b64 {{${n}, one}}, word{n};")
        lines += [f"xor.b32 one, one, ${2 * count};", "or.b32 other, other, one;"]
    lines += ["setp.ne.b32 late, other, 0;", "@late bra AGAIN;"]
    wanted = ", ".join(f"wanted{n}" for n in range(count))
    words = ", ".join(f"word{n}" for n in range(count))
    head = f"{{ .reg .pred late, {wanted}; .reg .b32 one, other; .reg .b64 {words};\n"
    return head + "\n".join(lines) + "\n}"


@constexpr_function
def asm_constraints(count):
    """Return the operand constraints of a loop that polls ``count`` messages per thread."""
    return ",".join(["=&r"] * count + ["l"] * count + ["r"] * (2 * count))
