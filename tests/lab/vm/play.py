"""One scenario from its share to its results."""

import dataclasses
import fcntl
import os
import pathlib
import re
import select
import shutil
import subprocess
import time

from . import machine
from .architecture import Architecture
from .binaries import Binaries, CannotStart
from .control_plane import OF_NODES, ControlPlane
from .guest import Guest, GuestDied
from .report import Report, Result
from .scenario import IMAGES, Scenario

LAB = pathlib.Path(__file__).resolve().parent.parent
ROOT = LAB.parent.parent
BOOT_SECONDS = 90
# A real kubelet for the scenarios that have one, instead of the stand-in.
KUBELET = os.environ.get("RDMA_LAB_KUBELET", "")
# A folder with the programs of a whole cluster, for the scenarios that need one.
KUBERNETES = os.environ.get("RDMA_LAB_KUBERNETES", "")
CONSOLE_LINES = 12


class Skipped(Exception):
    """This machine cannot run the scenario; the message says why."""


def has_kvm(architecture: Architecture) -> bool:
    """Whether guests can run on the processor itself, an x86 one (`build` works on no other). A /dev/kvm alone proves nothing: where the
    processor shows no virtualisation, it cannot run an unmodified kernel."""
    flags = pathlib.Path("/proc/cpuinfo").read_text()
    return architecture.name == "amd64" and os.access("/dev/kvm", os.R_OK | os.W_OK) and bool(re.search(r"\b(vmx|svm)\b", flags))


def qemu_version(cache: dict[str, pathlib.Path]) -> tuple[int, ...]:
    """The version of the QEMU that runs the guests."""
    shown = subprocess.run([*machine.emulator(cache), "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in re.search(r"version (\d+(?:\.\d+)*)", shown)[1].split("."))


class Play:
    """A scenario being played. `directory` holds its share, its logs and what it leaves."""

    def __init__(
        self,
        scenario: Scenario,
        cache: dict[str, pathlib.Path],
        binaries: Binaries,
        directory: pathlib.Path,
        report: Report,
        patience: float,
        tell=None,
    ) -> None:
        self.scenario = scenario
        self.cache = cache
        self.binaries = binaries
        self.directory = directory
        self.report = report
        self.patience = patience
        self.tell = tell
        self.results: list[Result] = []
        self.guests: list[Guest] = []
        self.control_plane: ControlPlane | None = None
        self.done: dict[int, int] = {}
        self.booted: dict[int, float] = {}

    def prepare(self) -> None:
        """Makes the share. Fails before anything is booted if something is missing."""
        shutil.rmtree(self.directory, ignore_errors=True)
        if self.scenario.qemu and (have := qemu_version(self.cache)) < self.scenario.qemu:
            wanted, version = (".".join(map(str, v)) for v in (self.scenario.qemu, have))
            raise Skipped(f"needs QEMU {wanted} or newer, this machine has {version}")
        if self.scenario.topology and self.binaries.architecture.name != "amd64":
            raise Skipped("its PCIe expanders need ACPI, without which guests of arm64 are booted")
        if self.scenario.kubernetes and not KUBERNETES:
            raise Skipped("needs RDMA_LAB_KUBERNETES, a folder with a cluster's programs (tests/lab/README.md)")
        for peer in self.scenario.peers:
            if not (pathlib.Path(KUBERNETES) / peer).is_file():
                raise Skipped(f"needs {peer} in the folder RDMA_LAB_KUBERNETES (tests/lab/README.md)")
        if self.scenario.cdi_containerd and "containerd" not in self.cache:
            raise Skipped("needs a containerd that reads CDI files, and no Debian mirror has one for these guests")
        if "mpi" in self.scenario.images and "mpi" not in self.cache:
            lacking = CannotStart if os.environ.get("CI") else Skipped
            raise lacking("needs the image of an MPI job, which the mirror lacks or which is for guests of Debian 12")
        found = [self.binaries.product(name) for name in self.scenario.binaries]
        found += [self.binaries.standin(name) for name in self.scenario.standins]
        share = self.directory / "share"
        (share / "sync").mkdir(parents=True)
        for place in ("bin", "out"):
            (share / place).mkdir()
        shutil.copytree(LAB / "guest", share / "guest")
        shutil.copytree(ROOT / "manifests", share / "manifests")
        shutil.copy(self.scenario.path, share / "scenario.sh")
        for file in ("demo-host", "policy.json"):
            shutil.copy(LAB / file, share)
        (share / "guests").write_text(f"{self.scenario.guests}\n")
        for binary in found:
            shutil.copy(binary, share / "bin")
        if KUBELET and "kubelet-standin" in self.scenario.standins:
            if "node" in self.scenario.images:
                raise Skipped("a real kubelet's static pods cannot have the DaemonSet's ConfigMap")
            # A scenario calls it by the stand-in's name, whichever it is.
            bin_ = share / "bin"
            (bin_ / "kubelet-standin").rename(bin_ / "kubelet-standin.objects")
            shutil.copy(KUBELET, bin_ / "kubelet")
            shutil.copy(LAB / "guest/kubelet-real", bin_ / "kubelet-standin")
            self.scenario = dataclasses.replace(
                self.scenario, memory=self.scenario.memory + 896, timeout=2 * self.scenario.timeout
            )
        if self.scenario.kubernetes:
            (share / "kubernetes").mkdir()
            for program in OF_NODES:
                shutil.copy(pathlib.Path(KUBERNETES) / program, share / "kubernetes")
        if self.scenario.dns:
            (share / "dns").touch()
        if self.scenario.peers:
            (share / "peers").mkdir()
            for peer in self.scenario.peers:
                shutil.copy(pathlib.Path(KUBERNETES) / peer, share / "peers")
        if self.scenario.cdi_containerd:
            shutil.copytree(self.cache["containerd"], share / "containerd")
        for image in self.scenario.images:
            shutil.copy(self.image(image), share / f"{image}.tar")

    def image(self, name: str) -> pathlib.Path:
        """A container image. That of the binaries under test is no part of a build, so it may not be
        there; continuous integration has made it before."""
        if name in ("pods", "mpi"):
            return self.cache["image" if name == "pods" else name] / "image.tar"
        lacking = CannotStart if os.environ.get("CI") else Skipped
        image = self.binaries.place / "image.tar"
        if not image.is_file():
            raise lacking(f"no image.tar in {self.binaries.place}: run `make image`")
        newest = max(self.binaries.product(name).stat().st_mtime for name in self.scenario.binaries)
        if image.stat().st_mtime < newest:
            raise lacking(f"{image} is older than the programs beside it: run `make image`")
        return image

    def boot(self, shell: bool) -> None:
        """Starts the guests and waits until each has its root."""
        architecture = self.binaries.architecture
        kvm = has_kvm(architecture)
        for number in range(1, self.scenario.guests + 1):
            command = machine.command(self.scenario, number, architecture, self.cache, self.directory, kvm, shell)
            self.guests.append(Guest(number, command, self.directory, shell))
        if self.scenario.kubernetes:
            self.control_plane = ControlPlane(self.guests[0], KUBERNETES, self.directory, self.scenario.guests)
        self.follow(BOOT_SECONDS * self.patience, lambda: len(self.booted) == len(self.guests))

    def follow(self, seconds: float | None, finished) -> None:
        """Takes in what the guests report until `finished`, or fails."""
        end = None if seconds is None else time.monotonic() + seconds
        while not finished():
            if end and time.monotonic() > end:
                raise TimeoutError(f"not finished after {seconds:.0f} s")
            dead = [guest for guest in self.guests if not guest.alive() and guest.number not in self.done]
            select.select([guest.control for guest in self.guests if guest.alive()], [], [], 0.2)
            for guest in self.guests:
                for line in guest.lines():
                    self.take(guest, line)
            for guest in dead:
                if guest.number not in self.done:
                    raise GuestDied(f"guest {guest.number} ended by itself")
            if self.control_plane and not self.control_plane.alive():
                raise GuestDied(f"the control plane ended by itself: {self.control_plane.log.read_text().strip()[-500:]}")

    def take(self, guest: Guest, line: str) -> None:
        """One line of a guest."""
        word, _, rest = line.partition(" ")
        match word:
            case "boot":
                self.booted[guest.number] = float(rest)
                guest.booted()
            case "done":
                self.done[guest.number] = int(rest)
            case "ok":
                self.result(guest, rest, "passed")
            case "not":
                self.result(guest, rest.removeprefix("ok "), "failed")
            case "skip":
                what, _, reason = rest.partition(" # ")
                self.result(guest, what, "skipped", reason)
            case "diag":
                self.detail(rest)
            case "tell":
                if self.tell:
                    self.tell(rest)
            case "machine":
                answer, _, command = rest.partition(" ")
                path = self.directory / "share" / "sync" / answer
                path.with_suffix(".new").write_text(guest.monitor_command(command))
                path.with_suffix(".new").rename(path)
            case "reset":
                guest.reset()
            case "api-server" if self.control_plane:
                self.control_plane.ask(rest)
            case _:
                self.result(guest, "speaks to the runner as agreed", "failed")
                self.detail(line)

    def result(self, guest: Guest, what: str, outcome: str, reason: str = "") -> None:
        """Notes a result."""
        if self.scenario.guests > 1:
            what = f"node{guest.number}: {what}"
        self.shown()
        self.results.append(Result(self.scenario.name, what, outcome, reason))
        if outcome == "passed":
            self.shown()

    def detail(self, line: str) -> None:
        """A remark on the last result."""
        if self.results:
            self.results[-1].details.append(line)

    _shown = 0

    def shown(self) -> None:
        """Prints, when results are printed as they come, those that are complete."""
        while self.report.live and self._shown < len(self.results):
            result = self.results[self._shown]
            self._shown += 1
            self.report.show(result, len(self.report.results) + self._shown)

    def console(self) -> list[str]:
        """The last lines of the guests' consoles."""
        lines = []
        for log in sorted(self.directory.glob("console-*.log")):
            tail = log.read_text(errors="replace").splitlines()[-CONSOLE_LINES:]
            lines += [f"{log.name}: {line}" for line in tail]
        return lines

    def broken(self, what: str, why: str) -> None:
        """A failure that the guests did not report themselves."""
        self.results.append(Result(self.scenario.name, what, "failed", details=[why, *self.console()]))

    def end(self) -> None:
        """Ends the guests, and their control plane."""
        if self.control_plane:
            self.control_plane.end()
            self.control_plane = None
        for guest in self.guests:
            guest.end()
        self.guests = []
        self.booted = {}

    def run(self, shell: bool = False) -> None:
        """Plays the scenario; the results go into the report."""
        started = time.monotonic()
        locks = [os.open(path, os.O_RDONLY) for path in self.cache.values()]
        try:
            for lock in locks:
                fcntl.flock(lock, fcntl.LOCK_SH)
            self._run(shell)
        except Skipped as why:
            self.results.append(Result(self.scenario.name, "whole scenario", "skipped", str(why)))
        except CannotStart as why:
            self.broken("can start", str(why))
        finally:
            self.end()
            for lock in locks:
                os.close(lock)
        self.shown()
        remark = f"{self.scenario.name}: {time.monotonic() - started:.1f} s"
        if self.directory.is_dir():
            for leftover in ("bin", "kubernetes", "peers", "containerd", *(f"{image}.tar" for image in IMAGES)):
                path = self.directory / "share" / leftover
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            remark += f", logs in {self.directory}"
        self.report.add(self.results, remark)

    def _run(self, shell: bool) -> None:
        self.prepare()
        for attempt in (1, 2):
            try:
                self.boot(shell)
                break
            except (GuestDied, TimeoutError) as why:
                if attempt == 2:
                    self.broken("boots", str(why))
                    return
                print(f"# {self.scenario.name}: boot failed ({why}), once more", flush=True)
                self.end()
        seconds = None if shell else self.scenario.timeout * self.patience
        try:
            self.follow(seconds, lambda: len(self.done) == len(self.guests))
        except (GuestDied, TimeoutError) as why:
            self.broken("ran to its end", str(why))
            return
        failed = any(result.outcome == "failed" for result in self.results)
        if any(self.done.values()) and not failed:
            self.broken("ran to its end", f"exit status {self.done}")
        if not self.results and not shell:
            self.broken("tries something", "the scenario reported no result")
