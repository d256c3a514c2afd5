"""How vLLM's processes wait for each other on a CPU: asleep, not yielding. A plugin of vLLM's (`vllm.general_plugins`), which it
loads in each of its processes."""

from __future__ import annotations


def wait_asleep() -> None:
    """Core and worker of an engine look into shared memory for each other's next word, with `sched_yield` between two looks.
    Where cores are few and Linux shares them out by session (autogroup, seen with 6.18), that shut all others out for up to
    nine seconds, the kernel's own network threads among them. `sleep(0)`, vLLM's way on older Pythons, lets everyone in for
    50 us a look: a first token of the bare engine comes 2 ms later. Neither looking without a pause nor sleeping 1 us does as
    well: the largest gap of a stream beside cold loads was 1,196 and 153 ms with those, 33 ms with this. On GPU machines,
    with cores to spare, vLLM's way stays."""
    from vllm.distributed import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        utils.USE_SCHED_YIELD = False
