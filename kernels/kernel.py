"""One kernel: its launch, and the roles of a CTA's warps in the passes that it takes.

Most kernels are one pass. Where sequences are not cut, each by one CTA, a backward is one kernel of two passes, both scans or,
at K = 8, a sweep behind the pass that it starts from: what the second reads of a sequence is there when it begins, and no other
CTA is waited for. Two passes share the memory and the registers of a CTA, and all its warps meet in between:

    warp 0          pass 1: load     |     pass 2: load
    warps 1..3      pass 1: help     |     pass 2: help
    warps 4..7      pass 1: state    |     pass 2: state
    warps 8..15     pass 1: tokens   |     pass 2: tokens
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from .blocks import sync
from .blocks.ptx import invalidate_mbarrier
from .scan import Problem, Scan
from .schedule import HandsOn


class Kernel:
    def __init__(self, *passes: Scan):
        """passes: with the same threads and registers."""
        self.passes = passes
        self.config = passes[0].config
        assert len({(p.config.threads, p.config.split) for p in passes}) == 1, f"{self.name}: registers differ"

    @property
    def name(self) -> str:
        return "_then_".join(p.config.name for p in self.passes)

    def start(self, tensors, problem, stream):
        """Launch it on tensors, by name: all CTAs, ready to start while the kernel before them drains."""
        problem = self.passes[0].narrowed(problem)
        loads, outputs = (tuple(part(tensors) for part in parts) for parts in zip(*[(p.loads, p.outputs) for p in self.passes]))
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(loads, outputs, problem).launch(
            grid=[problem.ctas, problem.runs, 1],
            block=[self.config.threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, loads, outputs, problem: Problem):
        """The device entry: hand each warp its role."""
        if cutlass.const_expr(len(self.passes) > 1):  # what is known when it is compiled costs no instruction
            problem = problem._replace(hands_on=Int32(HandsOn.NOTHING), late_ctas=Int32(0), runs=Int32(1))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for source in (source for sources in loads for source in sources):
                cpasync.prefetch_descriptor(source.atom)
        memory = SmemAllocator().allocate(max(p.config.shared_memory for p in self.passes), 1024)
        first = self.enter(0, memory, problem, warp)
        if warp < 4:
            self.load_and_help(loads, outputs, problem, warp, memory, first)
        else:
            if warp < 8:
                self.carry_state(problem, warp, memory, first)
            else:
                self.take_chunks(outputs, problem, warp, memory, first)

    def enter(self, number: int, memory, problem, warp, prepares: bool = True):
        """Shared memory and the ring of pass `number`, which warps 0 and 1 prepare. Behind another pass all warps meet first,
        and TMA sees what that one wrote."""
        p = self.passes[number]
        smem = p.allocate(memory)
        if number > 0:
            cute.arch.fence_proxy("async.global")
            cute.arch.sync_threads()
        if prepares:
            self.prepare(number, memory, smem, problem, warp)
        return smem, sync.load_pipeline(smem.barriers, p.config.stages, p.consumer_warps, p.ring_bytes)

    @cute.jit
    def prepare(self, number: int, memory, smem, problem, warp):
        """The pass's own mbarriers and the CTA's range."""
        if warp == 0:
            if cutlass.const_expr(number > 0):
                self.clear_barriers(number - 1, memory)
            self.passes[number].set_up_barriers(smem)
        elif warp == 1:
            self.passes[number].write_range(problem, smem.range, self.block(problem))

    def clear_barriers(self, number: int, memory):
        """The mbarriers of pass `number` become ordinary memory again."""
        barriers = self.passes[number].allocate(memory).barriers.toint()
        with cute.arch.elect_one():
            for i in range(self.passes[number].config.barriers):
                invalidate_mbarrier(barriers + 8 * i)
        cute.arch.sync_warp()

    def block(self, problem):
        """The CTA's number in its run, and the run. Those of a backward pass alone start from the last, whose sequence the
        forward scan has just left in the L2."""
        number, run, _ = cute.arch.block_idx()
        return (problem.ctas - 1 - number, problem.runs - 1 - run) if self.passes[0].backward else (number, run)

    def each_pass(self, problem, warp, memory, first, prepares: bool = False):
        """(number, pass, shared memory, ring) of each, for one role."""
        for number, p in enumerate(self.passes):
            yield number, p, *(self.enter(number, memory, problem, warp, prepares) if number > 0 else first)

    def load_and_help(self, loads, outputs, problem, warp, memory, first):
        """Warps 0 to 3."""
        cute.arch.setmaxregister_decrease(self.config.producer_registers)
        for number, _, smem, pipe in self.each_pass(problem, warp, memory, first, prepares=True):
            self.load_or_help(number, loads[number], outputs[number], smem, pipe, problem, warp)

    @cute.jit
    def load_or_help(self, number: int, loads, outputs, smem, pipe, problem, warp):
        if warp == 0:
            self.passes[number].load(loads, outputs, smem, pipe, self.passes[number].place(problem, smem))
        else:
            if cutlass.const_expr(number == 0):
                if warp == 3:
                    self.let_next_start()
            self.passes[number].help(outputs, smem, pipe, problem, warp)

    def let_next_start(self):
        """Once the kernel before is through, so that this one does not end before it: who runs knows that all kernels but the
        one before it are through."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

    def carry_state(self, problem, warp, memory, first):
        """Warps 4 to 7. The kernel before wrote the states that are loaded, or the zeros in the flags."""
        cute.arch.griddepcontrol_wait()
        cute.arch.setmaxregister_increase(self.config.state_registers)
        for _, p, smem, pipe in self.each_pass(problem, warp, memory, first):
            p.carry_state(smem, pipe, p.place(problem, smem))

    def take_chunks(self, outputs, problem, warp, memory, first):
        """The token warpgroups."""
        cute.arch.setmaxregister_increase(self.config.token_registers)
        for number, p, smem, pipe in self.each_pass(problem, warp, memory, first):
            p.take_chunks(outputs[number], smem, pipe, p.place(problem, smem))
