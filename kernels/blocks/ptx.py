"""One PTX instruction each: packed bf16 arithmetic and shared-memory accesses with the width the layout was made for.

The DSL reaches most of these through tensors, but it chooses width and order itself; a feature row is built from registers
whose position is the whole point, so the few instructions that decide it are named here. Instructions that touch memory are
marked as having side effects, which keeps them on their side of a barrier; arithmetic is left free to move.
"""

import struct

from cutlass import Float32, Int32, Int64, select_
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

ONES = 0x3F803F80  # (1.0, 1.0) as packed bf16
HALVES = 0x3F003F00  # (0.5, 0.5)
SIGNS = -0x7FFF8000  # the two sign bits of a packed pair
ONE_ZERO = 0x00003F80  # (1.0, 0.0): 1.0 in the low half


def _asm(result, operands, text, constraints, loc, ip, memory=False):
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=memory,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _words(values, loc, ip):
    return [Int32(value).ir_value(loc=loc, ip=ip) for value in values]


def _floats(values, loc, ip):
    return [Float32(value).ir_value(loc=loc, ip=ip) for value in values]


# ---- packed bf16: the low half is the first element ----


@dsl_user_op
def mul2(a, b, *, loc=None, ip=None):
    """(a0 b0, a1 b1), each the bf16 rounding of the exact product."""
    return Int32(_asm(T.i32(), _words((a, b), loc, ip), "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", loc, ip))


@dsl_user_op
def fma2(a, b, c, *, loc=None, ip=None):
    """(a0 b0 + c0, a1 b1 + c1), each rounded to bf16 once."""
    return Int32(_asm(T.i32(), _words((a, b, c), loc, ip), "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", loc, ip))


@dsl_user_op
def pack2(low, high, *, loc=None, ip=None):
    """Two fp32 values rounded to a packed bf16 pair."""
    operands = _floats((high, low), loc, ip)
    return Int32(_asm(T.i32(), operands, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", loc, ip))


@dsl_user_op
def straddle(a, b, *, loc=None, ip=None):
    """(a1, b0): the pair that begins one element after a."""
    return Int32(_asm(T.i32(), _words((a, b), loc, ip), "prmt.b32 $0, $1, $2, 0x5432;", "=r,r,r", loc, ip))


@dsl_user_op
def _bits_to_float(word, *, loc=None, ip=None):
    return Float32(llvm.bitcast(T.f32(), Int32(word).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def float_of(word):
    """The fp32 value whose bits a 32-bit word holds."""
    return _bits_to_float(word)


@dsl_user_op
def bits_of(value, *, loc=None, ip=None):
    """The 32-bit word of an fp32 value."""
    return Int32(llvm.bitcast(T.i32(), Float32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def unpack2(word):
    """[low, high] of a packed bf16 pair as fp32, exactly; of a constant as Python numbers."""
    if isinstance(word, int):
        return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in (word & 0xFFFF, word >> 16)]
    return [_bits_to_float(Int32(word) << 16), _bits_to_float(Int32(word) & Int32(-65536))]


def unpack(words):
    """All elements of packed bf16 pairs, in order, as fp32."""
    return [value for word in words for value in unpack2(word)]


def pick(condition, a, b):
    """a where condition holds, else b, for fp32: a select, never a branch."""
    return Float32(select_(condition, Float32(a), Float32(b)))


def pick_word(condition, a, b):
    """The same for 32-bit words; a condition known at compile time needs no instruction."""
    if isinstance(condition, bool):
        return Int32(a if condition else b)
    return Int32(select_(condition, Int32(a), Int32(b)))


@dsl_user_op
def recompute(word, below=None, *, loc=None, ip=None):
    """The same word, hidden from loop-invariant code motion: what is derived from it is computed where it is used, instead
    of waiting in a register for the whole loop (a dozen addresses of a thread are 100 to 200 bytes of spills).

    below: a power of two that the word is less than. The compiler, which cannot see it, would take divisions for those of
    negative numbers, 100 of 1430 instructions of a token warpgroup's chunk."""
    word = Int32(_asm(T.i32(), _words((word,), loc, ip), "mov.b32 $0, $1;", "=r,r", loc, ip, memory=True))
    return word if below is None else word & (below - 1)


@dsl_user_op
def mma_16x8x16(a, b, c, *, loc=None, ip=None):
    """a (16 x 16) b (16 x 8) + c (16 x 8) by one warp: four words, two words and four fp32 values a lane."""
    result = llvm.StructType.get_literal([T.f32()] * 4)
    text = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    operands = [*_words((*a, *b), loc, ip), *_floats(c, loc, ip)]
    out = _asm(result, operands, text, ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4), loc, ip)
    return [Float32(llvm.extractvalue(T.f32(), out, [i], loc=loc, ip=ip)) for i in range(4)]


# ---- shared memory, by 32-bit shared address ----


def _load_words(count, address, loc, ip, load="ld"):
    kind, names = {1: ("b32", "$0"), 4: ("v4.b32", "{$0,$1,$2,$3}")}[count]
    text = f"{load}.shared.{kind} {names}, [${count}];"
    result = T.i32() if count == 1 else llvm.StructType.get_literal([T.i32()] * count)
    out = _asm(result, _words((address,), loc, ip), text, ",".join(["=r"] * count + ["r"]), loc, ip, memory=True)
    if count == 1:
        return [Int32(out)]
    return [Int32(llvm.extractvalue(T.i32(), out, [i], loc=loc, ip=ip)) for i in range(count)]


@dsl_user_op
def lds32(address, *, loc=None, ip=None):
    """One word."""
    return _load_words(1, address, loc, ip)[0]


@dsl_user_op
def lds64(address, *, loc=None, ip=None):
    """Two fp32 values, 8-byte aligned."""
    result = llvm.StructType.get_literal([T.f32()] * 2)
    out = _asm(result, _words((address,), loc, ip), "ld.shared.v2.f32 {$0,$1}, [$2];", "=f,=f,r", loc, ip, memory=True)
    return [Float32(llvm.extractvalue(T.f32(), out, [i], loc=loc, ip=ip)) for i in range(2)]


@dsl_user_op
def lds128(address, *, loc=None, ip=None):
    """Four words, 16-byte aligned."""
    return _load_words(4, address, loc, ip)


@dsl_user_op
def sts32(address, word, *, loc=None, ip=None):
    """One word."""
    _asm(None, _words((address, word), loc, ip), "st.shared.b32 [$0], $1;", "r,r", loc, ip, memory=True)


@dsl_user_op
def sts128(address, a, b, c, d, *, loc=None, ip=None):
    """Four words, 16-byte aligned."""
    operands = _words((address, a, b, c, d), loc, ip)
    _asm(None, operands, "st.shared.v4.b32 [$0], {$1,$2,$3,$4};", "r,r,r,r,r", loc, ip, memory=True)


@dsl_user_op
def stmatrix4(address, a, b, c, d, *, loc=None, ip=None):
    """Four 8x8 bf16 matrices from accumulator-shaped registers; lane l gives the address of row l % 8 of matrix l / 8."""
    operands = _words((address, a, b, c, d), loc, ip)
    text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};"
    _asm(None, operands, text, "r,r,r,r,r", loc, ip, memory=True)


@dsl_user_op
def ldmatrix4_transposed(address, *, loc=None, ip=None):
    """Four 8x8 bf16 matrices, each transposed; lane l gives the address of row l % 8 of matrix l / 8."""
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];"
    result = llvm.StructType.get_literal([T.i32()] * 4)
    out = _asm(result, _words((address,), loc, ip), text, "=r,=r,=r,=r,r", loc, ip, memory=True)
    return [Int32(llvm.extractvalue(T.i32(), out, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def write_word(address, word, *, loc=None, ip=None):
    """A word that decides where warps go, and not what they compute: volatile, by which tests/ptx_machine.py knows it."""
    _asm(None, _words((address, word), loc, ip), "st.volatile.shared.b32 [$0], $1;", "r,r", loc, ip, memory=True)


@dsl_user_op
def read_word(address, *, loc=None, ip=None):
    """The word that `write_word` wrote, read again wherever it is asked for."""
    return _load_words(1, address, loc, ip, "ld.volatile")[0]


@dsl_user_op
def read_words(address, *, loc=None, ip=None):
    """Four words of that kind, 16-byte aligned."""
    return _load_words(4, address, loc, ip, "ld.volatile")


# ---- global memory, by 64-bit address ----


@dsl_user_op
def stg32(address, word, *, loc=None, ip=None):
    """One word."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), *_words((word,), loc, ip)]
    _asm(None, operands, "st.global.b32 [$0], $1;", "l,r", loc, ip, memory=True)


@dsl_user_op
def stg64(address, a, b, *, loc=None, ip=None):
    """Two fp32 values, 8-byte aligned."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), *_floats((a, b), loc, ip)]
    _asm(None, operands, "st.global.v2.f32 [$0], {$1,$2};", "l,f,f", loc, ip, memory=True)


@dsl_user_op
def stg128(address, a, b, c, d, *, loc=None, ip=None):
    """Four fp32 values, 16-byte aligned."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), *_floats((a, b, c, d), loc, ip)]
    _asm(None, operands, "st.global.v4.f32 [$0], {$1,$2,$3,$4};", "l,f,f,f,f", loc, ip, memory=True)


@dsl_user_op
def ldg128_or_zeros(address, wanted, *, loc=None, ip=None):
    """Four words, 16-byte aligned, from the L2, since another SM may have written them; zeros where `wanted` is 0.

    A predicate and no branch: ptxas serialises a product (C7515) whose accumulator comes from two sides of a branch."""
    text = """{
    .reg .pred wanted; setp.ne.s32 wanted, $5, 0;
    mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
    @wanted ld.global.cg.v4.b32 {$0,$1,$2,$3}, [$4];
    }"""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), *_words((wanted,), loc, ip)]
    result = llvm.StructType.get_literal([T.i32()] * 4)
    out = _asm(result, operands, text, "=&r,=&r,=&r,=&r,l,r", loc, ip, memory=True)
    return [Int32(llvm.extractvalue(T.i32(), out, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def prefetch_l2(address, size: int, *, loc=None, ip=None):
    """Bytes of global memory to the L2, 16-byte aligned, `size` a multiple of 16."""
    text = f"cp.async.bulk.prefetch.L2.global [$0], {size};"
    _asm(None, [Int64(address).ir_value(loc=loc, ip=ip)], text, "l", loc, ip, memory=True)


@dsl_user_op
def ldg64(address, *, loc=None, ip=None):
    """Two fp32 values, 8-byte aligned, from the L2."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip)]
    result = llvm.StructType.get_literal([T.f32()] * 2)
    out = _asm(result, operands, "ld.global.cg.v2.f32 {$0,$1}, [$2];", "=f,=f,l", loc, ip, memory=True)
    return [Float32(llvm.extractvalue(T.f32(), out, [i], loc=loc, ip=ip)) for i in range(2)]


@dsl_user_op
def sts64(address, a, b, *, loc=None, ip=None):
    """Two fp32 values, 8-byte aligned, to shared memory."""
    operands = [*_words((address,), loc, ip), *_floats((a, b), loc, ip)]
    _asm(None, operands, "st.shared.v2.f32 [$0], {$1,$2};", "r,f,f", loc, ip, memory=True)


@dsl_user_op
def invalidate_mbarrier(address, *, loc=None, ip=None):
    """The mbarrier at a shared address becomes ordinary memory."""
    _asm(None, _words((address,), loc, ip), "mbarrier.inval.shared::cta.b64 [$0];", "r", loc, ip, memory=True)


@dsl_user_op
def store_release(address, word, *, loc=None, ip=None):
    """One word, after everything this thread wrote or saw written before, for the whole GPU."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), *_words((word,), loc, ip)]
    _asm(None, operands, "st.release.gpu.global.b32 [$0], $1;", "l,r", loc, ip, memory=True)


@dsl_user_op
def spin_while_zero(address, *, loc=None, ip=None):
    """Wait until the word is not zero; what its writer released with it is then visible."""
    text = """{
    .reg .pred zero; .reg .b32 word;
    again: ld.acquire.gpu.global.b32 word, [$0];
    setp.eq.s32 zero, word, 0;
    @zero bra again;
    }"""
    _asm(None, [Int64(address).ir_value(loc=loc, ip=ip)], text, "l", loc, ip, memory=True)
