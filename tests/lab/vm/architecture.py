"""What differs between guests of one architecture and another. RDMA_LAB_ARCH chooses."""

import dataclasses
import os
import pathlib
import struct
import sys


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One architecture of guests."""

    # Debian's name of it, and Rust's.
    name: str
    target: str
    # e_machine of an ELF program (elf.h, EM_...).
    elf_machine: int
    # The machine that QEMU emulates, and its processor where there is no KVM.
    machine: tuple[str, ...]
    cpu: str
    # What takes the wide registers from that processor.
    without_wide: str
    # The guest's console, and the serial line on which it reports.
    console: str
    line: str
    # QEMU's device behind that line; None where the machine has it by itself.
    line_device: str | None
    # Kernel arguments of this architecture alone.
    kernel: str


ALL = {
    "amd64": Architecture(
        name="amd64",
        target="x86_64-unknown-linux-musl",
        elf_machine=62,
        # Without its PIT, by which a kernel on a loaded machine measures a clock that runs many times too fast.
        machine=("-M", "q35,pit=off"),
        # Without the words that have a kernel copy and clear memory byte by byte (an emulator does each
        # byte by itself), and without a fifth level of page tables: a fifth of a guest's processor time.
        # Below, rep_good: the same for words that copy and clear by eight bytes.
        cpu="max,-erms,-fsrm,-la57",
        without_wide=",-xsave",
        console="ttyS0",
        line="ttyS1",
        line_device=None,
        kernel="tsc=reliable no_timer_check clearcpuid=rep_good",
    ),
    "arm64": Architecture(
        name="arm64",
        target="aarch64-unknown-linux-musl",
        elf_machine=183,
        # The board has one serial port of its own; the other is a PCI card.
        machine=("-M", "virt,gic-version=3"),
        # Has neither pointer authentication nor SVE, which cost an emulator most of its time.
        cpu="neoverse-n1",
        without_wide="",
        console="ttyAMA0",
        line="ttyS0",
        line_device="pci-serial",
        kernel="",
    ),
}


def chosen() -> Architecture:
    """The architecture of this run's guests."""
    name = os.environ.get("RDMA_LAB_ARCH", "amd64")
    if name not in ALL:
        sys.exit(f"lab: RDMA_LAB_ARCH is {name}; guests can be {' or '.join(ALL)}")
    return ALL[name]


def of_program(path: pathlib.Path) -> str | None:
    """Name of the architecture that a program is for; None if it is no ELF program, or another's."""
    with open(path, "rb") as file:
        header = file.read(20)
    if len(header) < 20 or header[:6] != b"\x7fELF\x02\x01":
        return None
    machine = struct.unpack_from("<H", header, 18)[0]
    return next((arch.name for arch in ALL.values() if arch.elf_machine == machine), None)
