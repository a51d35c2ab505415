"""Results: one line each, in the manner of the Test Anything Protocol."""

import dataclasses
import sys
import threading


@dataclasses.dataclass
class Result:
    """One thing that was tried, or left out."""

    scenario: str
    what: str
    outcome: str  # "passed", "failed" or "skipped"
    reason: str = ""
    details: list[str] = dataclasses.field(default_factory=list)


class Report:
    """Collects results and prints them as they come, or a scenario's at its end."""

    def __init__(self, live: bool, quiet: bool) -> None:
        self.results: list[Result] = []
        self.live = live
        # A person who follows a narration (--tell) sees the failures only.
        self.quiet = quiet
        self.lock = threading.Lock()

    def add(self, results: list[Result], remark: str) -> None:
        """All results of one scenario, at its end."""
        with self.lock:
            for result in results:
                self.results.append(result)
                if not self.live:
                    self.show(result, len(self.results))
            if not self.quiet:
                print(f"# {remark}", flush=True)

    def count(self, outcome: str) -> int:
        """How many results have this outcome."""
        return sum(result.outcome == outcome for result in self.results)

    def show(self, result: Result, number: int) -> None:
        """Prints one result, with what is known about a failure."""
        if self.quiet and result.outcome == "passed":
            return
        out = sys.stderr if self.quiet else sys.stdout
        print(render(result, number), file=out, flush=True)

    def summary(self) -> str:
        """The last line."""
        return ", ".join(f"{self.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))


def render(result: Result, number: int) -> str:
    """A result as text: its line and, indented, its details."""
    word = "not ok" if result.outcome == "failed" else "ok"
    skipped = f" # SKIP {result.reason}" if result.outcome == "skipped" else ""
    return "\n".join(
        [f"{word} {number} - {result.scenario}: {result.what}{skipped}"] + [f"  # {line}" for line in result.details]
    )
