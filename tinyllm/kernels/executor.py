"""The compiled loop that every thread runs over a plan: call the op's kernel, wait for the others, next op.

There is no Python between ops. Waiting spins briefly, then yields the processor, then sleeps, so that a busy machine
stays usable.
"""

from __future__ import annotations

from .abi import JOB, OP_ARGUMENTS, OP_BYTES, OP_MANY, OP_ONE, OP_PRIVATE, OP_ROWS, Arguments
from .dealing import reset_tickets
from .simd import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_kernel,
    clock_ticks,
    load_i64,
    pause,
    prefetch,
    sched_yield,
    sleep_us,
    store_i64,
)
from .specialize import inline, specialize, static

# Turns of waiting before the processor is yielded, and before the thread sleeps.
SPINS, YIELDS = 200, 2000


@inline
def wait_until(counter, target):
    """Wait until the counter in memory has reached the target."""
    turns = 0
    while atomic_load(counter) < target:
        turns += 1
        if turns <= SPINS:
            pause()
        elif turns <= SPINS + YIELDS:
            sched_yield()
        else:
            sleep_us(50)


def execute(job, thread, n_threads):
    """Run the job's plan as thread number `thread`; the number of ops that were run.

    Thread 0 looks at the stop flag before it enters a barrier and says after which op to stop, so all threads leave
    together.
    """
    ops = load_i64(job + static(J.ops))
    n_ops = load_i64(job + static(J.n_ops))
    arrived = job + static(J.arrived)
    target = load_i64(job + static(J.arrived_before))
    stamps = load_i64(job + static(J.stamps))
    if stamps != 0:
        stamps += thread * (2 * n_ops + 1) * 8
        store_i64(stamps, clock_ticks())
    done = 0
    while done < n_ops:
        op = ops + done * OP_BYTES
        arguments = load_i64(op + OP_ARGUMENTS)
        rows = load_i64(load_i64(op + OP_ROWS))
        kernel = load_i64(op + OP_ONE) if rows == 1 else load_i64(op + OP_MANY)
        # What the next op will ask for first: it comes while this one computes.
        following = load_i64(ops + min(done + 1, n_ops - 1) * OP_BYTES + OP_ARGUMENTS)
        for line in static(range(0, ARGUMENTS_BYTES, 64)):
            prefetch(following + line)
        if rows > 0 and kernel != 0:
            call_kernel(kernel, arguments, thread, n_threads)
        if stamps != 0:
            store_i64(stamps + 8 + 16 * done, clock_ticks())
        alone = kernel == 0 or (rows == 1 and load_i64(op + OP_PRIVATE) != 0)
        if thread == 0:
            if done > 0:
                # Everybody has left the op before: its tickets can be dealt out anew.
                reset_tickets(load_i64(op - OP_BYTES + OP_ARGUMENTS))
            if atomic_load(job + static(J.stop)) != 0:
                atomic_store(job + static(J.stop_after), done + 1)
        if n_threads > 1 and not alone:
            target += n_threads
            atomic_add(arrived, 1)
            wait_until(arrived, target)
        if stamps != 0:
            store_i64(stamps + 16 + 16 * done, clock_ticks())
        done += 1
        stop_after = 0 if alone else atomic_load(job + static(J.stop_after))
        if stop_after != 0 and done >= stop_after:
            break
    if thread == 0 and done > 0:
        reset_tickets(load_i64(ops + (done - 1) * OP_BYTES + OP_ARGUMENTS))
    return done


def serve(job, thread, n_threads, last_epoch, patience):
    """A worker's loop: run each job that is published, and return when none came for `patience` turns of waiting.

    Returns the number of the last job that was seen, so that the caller can park and come back.
    """
    turns = 0
    while turns < patience:
        epoch = atomic_load(job + static(J.epoch))
        if epoch != last_epoch:
            last_epoch = epoch
            if load_i64(job + static(J.quit)) != 0:
                break
            execute(job, thread, n_threads)
            atomic_add(job + static(J.left), 1)
            turns = 0
        turns += 1
        if turns <= SPINS:
            pause()
        else:
            sched_yield()
    return last_epoch


def publish(job):
    """Make the job visible to the workers."""
    atomic_store(job + static(J.stop_after), 0)
    atomic_store(job + static(J.left), 0)
    return atomic_add(job + static(J.epoch), 1)


def lead(job, thread, n_threads):
    """Run the published job as thread 0 and wait until all workers have left it; the number of ops that were run.

    A thread that is alone has nobody to publish it to.
    """
    if n_threads == 1:
        atomic_store(job + static(J.stop_after), 0)
    done = execute(job, thread, n_threads)
    store_i64(job + static(J.arrived_before), atomic_load(job + static(J.arrived)))
    wait_until(job + static(J.left), n_threads - 1)
    return done


_LAYOUT = {
    "J": JOB,
    "ARGUMENTS_BYTES": 8 * Arguments.WORDS,
    "OP_BYTES": OP_BYTES,
    "OP_ARGUMENTS": OP_ARGUMENTS,
    "OP_ONE": OP_ONE,
    "OP_MANY": OP_MANY,
    "OP_PRIVATE": OP_PRIVATE,
    "OP_ROWS": OP_ROWS,
}


def _build(function, **callees):
    kernel = specialize(function, **_LAYOUT, **callees)
    kernel.returns_int = True
    return kernel


def _build_with_execute(function):
    return _build(function, execute=inline(specialize(execute, **_LAYOUT)))


KERNELS = {
    "serve": lambda: _build_with_execute(serve),
    "lead": lambda: _build_with_execute(lead),
    "publish": lambda: _build(publish),
}
