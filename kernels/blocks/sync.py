"""Who waits for whom: the named barriers of both scans and the pipeline that feeds them."""

import enum

import cutlass.cute as cute
import cutlass.pipeline as pipeline

WARP = 32
WARPGROUP = 128


class Barrier(enum.IntEnum):
    """Named barriers; 0 belongs to __syncthreads. Those of a pair are indexed by the parity of the chunk, which is also the
    token warpgroup that takes the chunk and the buffer its state copy is in."""

    STATE = 1  # the state warpgroup's own four warps
    STATE_FULL = 2  # and 3: state warpgroup -> token warpgroup, the copy of the state is there
    STATE_FREE = 4  # and 5: token warpgroup -> state warpgroup, the copy has been read
    STAGED = 6  # and 7: token warpgroup -> storing warp, dv lies in shared memory


def arrive(barrier: Barrier, parity, threads: int):
    """Signal without waiting; `threads` counts both sides."""
    cute.arch.barrier_arrive(barrier_id=int(barrier) + parity, number_of_threads=threads)


def wait(barrier: Barrier, parity, threads: int):
    """Arrive and wait for the rest."""
    cute.arch.barrier(barrier_id=int(barrier) + parity, number_of_threads=threads)


def publish():
    """Make this thread's ordinary shared-memory writes visible to WGMMA and TMA; a barrier must follow."""
    cute.arch.fence_view_async_shared()


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
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages: int):
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)
