"""Which scenarios run beside each other."""

import concurrent.futures
import threading
from collections.abc import Callable

from .scenario import Scenario


def of(scenario: Scenario) -> int:
    """The processors that it keeps busy: an emulated one keeps one of this machine's."""
    if scenario.busy:
        return scenario.busy
    each = max(scenario.cpus, scenario.topology[0] if scenario.topology else 1)
    return scenario.guests * each


def run_all(scenarios: list[tuple[Scenario, Callable[[], None]]], processors: int) -> None:
    """Runs each as soon as its processors are free, one that needs more than there are by itself.
    Those that need most begin, then those that may take longest, so that little is idle at the end."""
    waiting = sorted(scenarios, key=lambda one: (-min(of(one[0]), processors), -one[0].timeout))
    free = processors
    changed = threading.Condition()

    def run(scenario: Scenario, play: Callable[[], None]) -> None:
        nonlocal free
        try:
            play()
        finally:
            with changed:
                free += min(of(scenario), processors)
                changed.notify()

    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(waiting))) as pool:
        running = []
        for scenario, play in waiting:
            with changed:
                changed.wait_for(lambda wanted=min(of(scenario), processors): wanted <= free)
                free -= min(of(scenario), processors)
            running.append(pool.submit(run, scenario, play))
        for finished in running:
            finished.result()
