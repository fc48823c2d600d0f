"""Who waits for whom: the named barriers of both scans and the pipeline that feeds them."""

import enum

import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Uint32

from .ptx import spin_while_zero, store_release

WARP = 32
WARPGROUP = 128


class Barrier(enum.IntEnum):
    """Named barriers; 0 belongs to __syncthreads. Each but STATE, KEYS_FULL and KEYS_FREE stands for several, one for each
    token warpgroup or feature tile: a token warpgroup's number is also that of the buffer its copy of the state is in."""

    STATE = 1  # the state warpgroup's own four warps
    STATE_FULL = 2  # state warpgroup -> token warpgroup: the copy of the state is there
    STATE_FREE = 4  # token warpgroup -> state warpgroup: the copy has been read
    STAGED = 6  # token warpgroup -> storing warp: dv lies in shared memory
    TILE_FULL = 2  # token warpgroup -> state warpgroup: the features are there (segment_state.py)
    TILE_FREE = 6  # state warpgroup -> token warpgroup: they have been multiplied
    BEFORE_FULL = 8  # state warpgroup -> token warpgroup: the state before the chunk is there (sweep.py)
    FEATURES = 10  # token warpgroup -> state warpgroup: the features of the queries are there (sweep.py)
    WEIGHTS = 12  # a token warpgroup's own four warps (sweep.py)
    ROWS_FULL = 14  # token warpgroup -> warp 3: r and h are there (sweep.py)
    KEYS_FULL = 6  # warps 1 and 2 -> state warpgroup: the features of the keys are there (sweep.py)
    KEYS_FREE = 7  # state warpgroup -> warps 1 and 2: they have been multiplied


def arrive(barrier: Barrier, group, threads: int):
    """Signal without waiting; `threads` counts both sides."""
    cute.arch.barrier_arrive(barrier_id=int(barrier) + group, number_of_threads=threads)


def wait(barrier: Barrier, group, threads: int):
    """Arrive and wait for the rest."""
    cute.arch.barrier(barrier_id=int(barrier) + group, number_of_threads=threads)


def publish():
    """Make this thread's ordinary shared-memory writes visible to WGMMA and TMA; a barrier must follow."""
    cute.arch.fence_view_async_shared()


@cute.jit
def raise_flag(address, thread):
    """Say to another CTA that what the state warpgroup wrote to global memory is there."""
    cute.arch.fence_acq_rel_gpu()
    wait(Barrier.STATE, 0, WARPGROUP)
    if thread == 0:
        store_release(address, 1)


@cute.jit
def await_flag(address, thread):
    """Wait, as the state warpgroup, until another CTA has raised the flag, and lower it for the next pass."""
    if thread == 0:
        spin_while_zero(address)
        store_release(address, 0)
    wait(Barrier.STATE, 0, WARPGROUP)


def load_pipeline(barriers, stages: int, consumer_warps: int, bytes_per_stage: int):
    """A ring of stages: one warp loads, `consumer_warps` warps release each stage."""
    group = pipeline.CooperativeGroup
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=stages,
        producer_group=group(pipeline.Agent.Thread),
        consumer_group=group(pipeline.Agent.Thread, consumer_warps),
        tx_count=bytes_per_stage,
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    )


def producer_state(stages: int):
    """The ring as its producer sees it: the first round finds every stage empty."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages: int, position):
    """The ring as its consumers see it at chunk number `position`; unsigned, since a signed remainder takes twice as long."""
    position = Uint32(position)
    return pipeline.PipelineState(stages, Int32(position), Int32(position % stages), Int32(position // stages % 2))


def advanced(stage, chunks: int):
    """The ring `chunks` stages further on, one at a time: a remainder by the number of stages takes 30 cycles.

    A value and not a change in place: the compiler carries round a loop only what the loop's own text assigns."""
    stage = stage.clone()
    for _ in range(chunks):
        stage.advance()
    return stage
