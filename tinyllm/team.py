"""The threads that run plans together. A plan goes in as a table of ops; the team runs it without Python in between.

Workers wait for the next job in compiled code for a moment, then park on a lock, so that an idle program uses no CPU.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from .errors import TinyLLMError
from .kernels.abi import JOB
from .kernels.jit import kernel_addresses

TEAM_KERNELS = {"executor.lead", "executor.serve", "executor.publish"}
_INT = ctypes.c_int64
_PATIENCE = 3000  # turns of waiting before a worker parks: some tenths of a millisecond


def default_threads() -> int:
    """CPUs that this process may use: its affinity, one thread per physical core, and the container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len({_core_of(cpu) for cpu in os.sched_getaffinity(0)})
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def _core_of(cpu: int) -> tuple[str, str] | int:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (topology / "physical_package_id").read_text().strip(), (topology / "core_id").read_text().strip()
    except OSError:
        return cpu


def _cgroup_quota() -> float | None:
    """CPUs' worth of time that the container allows, or None."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        period = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 and period > 0 else None
    except (OSError, ValueError):
        return None


_teams: weakref.WeakSet[Team] = weakref.WeakSet()


def _after_fork() -> None:
    for team in _teams:
        team._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Team:
    """`n_threads` threads (the caller's is one of them) that execute plans.

    One job runs at a time; concurrent callers wait for each other. `recorder` is asked before each run where its stamps
    shall go (an address, 0: nowhere), so that a caller can time what others run.
    """

    def __init__(self, n_threads: int):
        self.n_threads = n_threads
        self.recorder: Callable[[np.ndarray], int] | None = None
        self._observers: dict[int, Callable[[int], None]] = {}
        addresses = kernel_addresses(TEAM_KERNELS)
        # A ctypes call releases the GIL.
        self._lead = ctypes.CFUNCTYPE(_INT, _INT, _INT, _INT)(addresses["executor.lead"])
        self._serve = ctypes.CFUNCTYPE(_INT, _INT, _INT, _INT, _INT, _INT)(addresses["executor.serve"])
        self._publish = ctypes.CFUNCTYPE(_INT, _INT)(addresses["executor.publish"])
        self._memory = np.zeros(JOB.BYTES + 128, np.uint8)
        self._job = self._memory.ctypes.data + -self._memory.ctypes.data % 128
        offset = self._job - self._memory.ctypes.data
        self._words = memoryview(self._memory[offset : offset + JOB.BYTES].view(np.int64))
        self._table: np.ndarray | None = None  # the one that the job's words tell of
        self._busy = threading.Lock()
        # For whoever has several things to do around a run that belong together.
        self.steps = threading.Lock()
        self._refusal = ""
        self._parked = [False] * n_threads
        self._wake = [threading.Semaphore(0) for _ in range(n_threads)]
        self._workers: list[threading.Thread] = []
        self._pid = os.getpid()
        # Workers must have left compiled code before the interpreter frees the memory that they look at.
        _teams.add(self)
        self._finalizer = weakref.finalize(self, _end_workers, self._words, self._wake, self._workers)

    def _start_workers(self) -> None:
        if self._pid != os.getpid():
            # Threads do not survive a fork: the child starts its own.
            self._pid = os.getpid()
            self._workers.clear()
            self._parked[:] = [False] * self.n_threads
        for thread in range(1 + len(self._workers), self.n_threads):
            epoch = self._words[JOB.epoch // 8]
            shared = (epoch, self._serve, self._job, self._words, self._parked, self._wake[thread])
            worker = threading.Thread(
                target=_work, args=(thread, self.n_threads, *shared), name=f"tinyllm-{thread}", daemon=True
            )
            worker.start()
            self._workers.append(worker)

    def run(self, table: np.ndarray, stamps: np.ndarray | None = None) -> int:
        """Execute the ops of `table` (int64 [n_ops, 4]); the number of ops that were run, fewer if `stop` was called.

        `stamps`: int64 [n_threads, 2 · n_ops + 1] receives clock ticks: the start, then per op when the thread's own
        work ended and when all threads had finished.
        """
        self._refuse_if_unusable()
        if self._observers and (observer := self._observers.pop(threading.get_ident(), None)):
            return self._run_observed(table, observer)
        with self._busy:
            stamps_at = 0
            if stamps is not None:
                stamps_at = stamps.ctypes.data
            elif self.recorder is not None:
                stamps_at = self.recorder(table)
            words = self._words
            if table is not self._table:
                words[JOB.ops // 8] = table.ctypes.data
                words[JOB.n_ops // 8] = len(table)
                self._table = table
            words[JOB.stamps // 8] = stamps_at
            if self.n_threads > 1:
                if len(self._workers) < self.n_threads - 1 or self._pid != os.getpid():
                    self._start_workers()
                self._publish(self._job)
                for thread in range(1, self.n_threads):
                    if self._parked[thread]:
                        self._wake[thread].release()
            return self._lead(self._job, 0, self.n_threads)

    def run_interruptible(self, table: np.ndarray) -> None:
        """Like `run`, from the main thread: Ctrl-C ends the job after the op that it is in, and is raised then."""
        self._refuse_if_unusable()
        if threading.get_ident() in self._observers:
            self.run(table)  # signals are taken between the ops
            return
        done = threading.Event()  # not Thread.join: once interrupted, it takes the thread for ended

        def run() -> None:
            try:
                self.run(table)
            finally:
                done.set()

        runner = threading.Thread(target=run, name="tinyllm-leader")
        try:
            runner.start()
            done.wait()
        except BaseException:
            # The main thread cannot take signals while it is in compiled code; here it waits in Python, where it can.
            self._words[JOB.stop // 8] = 1
            ended = False
            while not ended:
                with suppress(KeyboardInterrupt):
                    ended = done.wait(0.5) or not runner.is_alive()
            self._words[JOB.stop // 8] = 0
            raise

    @contextmanager
    def observed(self, observer: Callable[[int], None]) -> Iterator[None]:
        """What this thread runs meanwhile is run op by op, and `observer` is called with an op's index behind each.

        The kernels and their order are those of an ordinary run, and so are all values. The observer may run ops
        itself.
        """
        self._observers[threading.get_ident()] = observer
        try:
            yield
        finally:
            self._observers.pop(threading.get_ident(), None)

    @property
    def is_observed(self) -> bool:
        """Whether this thread's runs have an observer."""
        return bool(self._observers) and threading.get_ident() in self._observers

    def _run_observed(self, table: np.ndarray, observer: Callable[[int], None]) -> int:
        """Run each op by itself; meanwhile the observer is not in force, so that it can run ops of its own."""
        try:
            for index in range(len(table)):
                self.run(table[index : index + 1])
                observer(index)
        finally:
            self._observers[threading.get_ident()] = observer
        return len(table)

    def close(self) -> None:
        """End the workers; the team runs nothing any more."""
        self._refusal = "this model was closed; load it again"
        self._finalizer()

    def _refuse_if_unusable(self) -> None:
        if self._refusal:
            raise TinyLLMError(self._refusal)

    def _after_fork(self) -> None:
        """In a forked child: no thread came along, and a run that was under way cannot be finished."""
        if self._busy.locked() or self.steps.locked():
            self._refusal = "this model was in use while the process forked; load it again in the child"
        self._busy, self.steps = threading.Lock(), threading.Lock()


def _work(
    thread: int,
    n_threads: int,
    epoch: int,
    serve: Callable,
    job: int,
    words: memoryview,
    parked: list[bool],
    wake: threading.Semaphore,
) -> None:
    """A worker: serve jobs in compiled code, park when none comes. It holds no reference to its team."""
    while not words[JOB.quit // 8]:
        epoch = serve(job, thread, n_threads, epoch, _PATIENCE)
        # Announce the parking before the last look: a job is published before the announcement is read, so one of the
        # two sides sees the other.
        parked[thread] = True
        if words[JOB.epoch // 8] == epoch and not words[JOB.quit // 8]:
            wake.acquire()
        parked[thread] = False


def _end_workers(words: memoryview, wake: list[threading.Semaphore], workers: list[threading.Thread]) -> None:
    words[JOB.quit // 8] = 1
    words[JOB.epoch // 8] += 1
    for semaphore in wake:
        semaphore.release()
    for worker in workers:
        worker.join(timeout=1)
    workers.clear()
