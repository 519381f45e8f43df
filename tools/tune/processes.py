"""Processes: how the processes of one training connect, compare their inputs, and end when one of them is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object

from spaceport.graphs.contract.faults import InputFault, OptionFault, SpaceportError

Result = TypeVar("Result")

_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # as accelerate reads them

# Parts of the messages of gloo and NCCL; both raise plain RuntimeErrors in a backward pass.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
_SILENT = ("Timed out", "timed out", "Timeout")


class ProcessLost(SpaceportError):
    """Another process of the training ended, or has not answered in time."""


def open_accelerator(bf16: bool, timeout: float) -> Accelerator:
    """The accelerator of this process, connected with the other processes of the launch.

    `timeout` is the longest time in seconds that a process waits for the others.
    """
    launched = _launched_processes(os.environ)
    AcceleratorState._reset_state()  # it would keep the precision of the process' first training
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))
    cpu = launched > 1 and not torch.accelerator.is_available()  # else accelerate opens one training in each process
    try:
        accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no", cpu=cpu, kwargs_handlers=[limit])
    except RuntimeError as error:
        if launched == 1 or not (_is_lost(error) or _is_silent(error)):
            raise
        raise ProcessLost(
            f"{launched} processes expected, and not all have connected to {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')} within {timeout:g} s: start all of them, and see their messages"
        ) from error
    if accelerator.num_processes < launched:
        raise OptionFault(
            f"{launched} processes were started, and accelerate connected {accelerator.num_processes}: expected a launch by "
            "torchrun, which starts them on CPUs and GPUs"
        )
    return accelerator


@contextmanager
def failing_together(accelerator: Accelerator) -> Iterator[None]:
    """Raise in all processes if one of them raises in the block, so that no process waits for one that has ended."""
    own: SpaceportError | None = None
    try:
        yield
    except SpaceportError as error:
        own = error
    reasons: list[str | None] = gather_object([None if own is None else str(own)])
    if own is not None:
        raise own
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise InputFault(f"rank {rank} cannot start: {reason}")


def require_same(accelerator: Accelerator, facts: Mapping[str, str], advice: str) -> None:
    """Raise in all processes if their facts differ."""
    if accelerator.num_processes == 1:
        return
    found: list[Mapping[str, str]] = gather_object([dict(facts)])
    wrong = [difference for name in facts if (difference := _difference(name, [each.get(name) for each in found]))]
    if wrong:
        raise InputFault(f"the processes of this training differ ({'; '.join(wrong)}): {advice}")


def by_main_process(accelerator: Accelerator, work: Callable[[Callable[[], None]], Result], timeout: float) -> Result:
    """The result of work that only the main process does, for all; the others wait as long as the work goes on.

    The work calls the function that it is given more often than four times in `timeout` seconds.
    """
    if accelerator.num_processes == 1:
        return work(lambda: None)
    if not accelerator.is_main_process:
        while _any(accelerator, False):
            pass
        return broadcast_object_list([None])[0]  # type: ignore[no-any-return]
    last = time.monotonic()

    def going_on() -> None:
        nonlocal last
        if time.monotonic() - last > timeout / 4:
            _any(accelerator, True)
            last = time.monotonic()

    found = work(going_on)
    _any(accelerator, False)
    broadcast_object_list([found])
    return found


@contextmanager
def lost_processes_reported(accelerator: Accelerator, timeout: float, advice: Callable[[], str]) -> Iterator[None]:
    """Raise `ProcessLost` where the libraries' error says that another process has ended or does not answer."""
    try:
        yield
    except RuntimeError as error:
        if accelerator.num_processes == 1:
            raise
        if _is_silent(error):
            raise ProcessLost(
                f"another process has not answered for {timeout:g} s (--process-timeout): it hangs, or its machine or "
                f"network is down; {advice()}"
            ) from error
        if _is_lost(error):
            raise ProcessLost(f"lost another process, whose messages say why; {advice()}") from error
        raise


def lost_process(error: BaseException) -> bool:
    """Whether an error of torch says that another process has ended or does not answer."""
    return isinstance(error, RuntimeError) and (_is_lost(error) or _is_silent(error))


def _any(accelerator: Accelerator, value: bool) -> bool:
    """Whether the value is true in any process."""
    return bool(accelerator.reduce(torch.tensor(int(value), device=accelerator.device), "sum").item())


def _launched_processes(environment: Mapping[str, str]) -> int:
    """The number of processes of the launch."""
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise OptionFault(
            f"--max-restarts is {restarts}, and restarted processes would read the addresses of those that ended: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and start torchrun with --standalone or --rdzv-backend c10d"
        )
    sizes = [environment[name] for name in _SIZES if name in environment]
    if sizes:
        return max(1, int(sizes[0]))
    # accelerate launch sets both, MASTER_PORT only where several processes are asked for, and starts one if there is no GPU
    if "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_PORT" in environment:
        raise OptionFault(
            "`accelerate launch` was asked for several processes and has started one, as it does on CPUs: use `torchrun "
            "--nproc-per-node N --no-python spaceport tune ...`, or `accelerate launch --multi_gpu`, which start N "
            "processes on CPUs too"
        )
    return 1


def _difference(name: str, values: list[str | None]) -> str | None:
    """What the first rank and the first one that differs from it have; None if all have the same."""
    for rank, value in enumerate(values):
        if value != values[0]:
            return f"{name}: {values[0]} on rank 0, {value} on rank {rank}"
    return None


def _is_silent(error: RuntimeError) -> bool:
    return any(part in str(error) for part in _SILENT)


def _is_lost(error: RuntimeError) -> bool:
    return isinstance(error, torch.distributed.DistError) or any(part in str(error) for part in _LOST)
