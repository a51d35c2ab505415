"""A guest as QEMU's command line: what is in the machine and where it is plugged in.

Pure: from a scenario to a list of arguments.
"""

import os
import pathlib

from . import control_plane
from .architecture import Architecture
from .scenario import Scenario

# Quiet and without what a guest under emulation need not wait for. Timers are those of the kernel's tick
# (highres=off): each finer one, as Go's runtime sets many, interrupts the emulator.
KERNEL_ARGUMENTS = (
    "quiet loglevel=4 panic=-1 net.ifnames=0 nokaslr mitigations=off "
    "random.trust_cpu=on cryptomgr.notests audit=0 nowatchdog rcupdate.rcu_expedited=1 8250.nr_uarts=2 "
    "transparent_hugepage=never highres=off"
)


def emulator(cache: dict[str, pathlib.Path]) -> list[str]:
    """QEMU as RDMA_LAB_QEMU names it, or else the one that was unpacked for these guests with its
    own libraries, or else the system's."""
    if named := os.environ.get("RDMA_LAB_QEMU"):
        return [named]
    if not (tree := cache.get("qemu")):
        return ["qemu-system-x86_64"]
    libraries = ":".join(f"{tree}/{place}/x86_64-linux-gnu" for place in ("lib", "usr/lib"))
    return [
        f"{tree}/lib64/ld-linux-x86-64.so.2", "--library-path", libraries,
        f"{tree}/usr/bin/qemu-system-aarch64", "-L", f"{tree}/usr/share/qemu",
    ]  # fmt: skip


def nic(number: int, guest: int, bus: str, speed: int) -> list[str]:
    """A NIC on the scenario's wire. Its netdev is net<number>, its device nic<number>."""
    return [
        "-netdev", f"hubport,id=net{number},hubid=0",
        "-device", f"virtio-net-pci,id=nic{number},netdev=net{number},bus={bus},romfile=,disable-legacy=on,"
        f"mac=52:54:00:00:{guest:02x}:{number:02x},speed={speed},duplex=full",
    ]


def plain_slots(scenario: Scenario, guest: int) -> list[str]:
    """Each NIC in a root port of its own, then the empty ports."""
    arguments = []
    for slot in range(scenario.nics + scenario.ports):
        arguments += ["-device", f"pcie-root-port,id=port{slot},chassis={slot + 1},slot={slot + 1}"]
        if slot < scenario.nics:
            arguments += nic(slot, guest, f"port{slot}", 100_000)
    return arguments


def topology(scenario: Scenario, guest: int) -> list[str]:
    """NUMA nodes with PCIe switches, each switch with NICs and a display device beside them.

    The first NIC of a switch is a 200 Gb/s one, the others have half.
    """
    nodes, switches, nics = scenario.topology
    arguments: list[str] = []
    slot = number = 0
    for node in range(nodes):
        arguments += [
            "-object", f"memory-backend-ram,id=mem{node},size={scenario.memory // nodes}M",
            "-numa", f"node,nodeid={node},memdev=mem{node},cpus={node}",
            "-device", f"pxb-pcie,id=node{node},bus_nr={0x20 + 0x60 * node},numa_node={node},bus=pcie.0",
        ]
        for switch in range(switches):
            slot += 1
            up = f"up{node}{switch}"
            arguments += [
                "-device", f"pcie-root-port,id=root{node}{switch},bus=node{node},chassis={slot},slot={slot}",
                "-device", f"x3130-upstream,id={up},bus=root{node}{switch}",
            ]
            for place in range(nics + 1):
                slot += 1
                down = f"down{node}{switch}{place}"
                arguments += ["-device", f"xio3130-downstream,id={down},bus={up},chassis={slot},slot={slot}"]
                if place < nics:
                    arguments += nic(number, guest, down, 100_000 if place else 200_000)
                    number += 1
                else:
                    arguments += ["-device", f"ati-vga,bus={down}"]
    if nodes > 1:
        arguments += ["-numa", "dist,src=0,dst=1,val=21"]
    return arguments


def wire(guests: int, guest: int, directory: pathlib.Path) -> list[str]:
    """Joins the guests' wires; the first guest listens.

    A lone guest's wire ends without a listener. With no end at all QEMU would never take a
    frame from the NIC, and one that is never sent keeps the network namespace of its sender.
    """
    if guests == 1:
        return [
            "-netdev", f"dgram,id=link,local.type=unix,local.path={directory}/wire-{guest},"
            f"remote.type=unix,remote.path={directory}/nowhere",
            "-netdev", "hubport,id=linkport,hubid=0,netdev=link",
        ]
    role = "on" if guest == 1 else "off"
    return [
        "-netdev", f"stream,id=link,server={role},addr.type=unix,addr.path={directory}/wire",
        "-netdev", "hubport,id=linkport,hubid=0,netdev=link",
    ]


def control_plane_port() -> list[str]:
    """Joins the wire and the control plane's NIC, which QEMU makes in its network namespace."""
    return [
        "-netdev", f"tap,id=control,ifname={control_plane.NIC},script=no,downscript=no",
        "-netdev", "hubport,id=controlport,hubid=0,netdev=control",
    ]  # fmt: skip


def share(tag: str, path: pathlib.Path, writable: bool = False) -> list[str]:
    """A directory of this machine as a 9p file system of the guest."""
    mode = "" if writable else ",readonly=on,multidevs=remap"
    return [
        "-fsdev", f"local,id={tag},path={path},security_model=none{mode}",
        "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}",
    ]


def command(
    scenario: Scenario,
    guest: int,
    architecture: Architecture,
    cache: dict[str, pathlib.Path],
    directory: pathlib.Path,
    kvm: bool,
    shell: bool,
) -> list[str]:
    """The whole command line. Sockets `control-N` and `qmp-N` of the directory are the runner's."""
    kernel = (
        f"console={architecture.console} {KERNEL_ARGUMENTS} {architecture.kernel} lab.line={architecture.line} "
        f"lab.guest={guest} lab.host=node{guest} lab.fabric={scenario.fabric} {' '.join(scenario.kernel)}"
    )
    if shell:
        kernel += " lab.shell"
        console = ["-serial", "mon:stdio"]
    else:
        console = ["-serial", f"file:{directory}/console-{guest}.log"]
    with_control_plane = scenario.kubernetes and guest == 1
    # Wide registers cost an emulator a tenth of its time.
    processor = f"{architecture.cpu}{architecture.without_wide}"
    arguments = [
        *(control_plane.namespace() if with_control_plane else []),
        *emulator(cache), *architecture.machine, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        *(["-accel", "kvm", "-cpu", "host"] if kvm else ["-accel", "tcg,thread=multi", "-cpu", processor]),
        "-m", str(scenario.memory), "-smp", str(max(scenario.cpus, scenario.topology[0] if scenario.topology else 1)),
        *console,
        "-chardev", f"socket,id=control,path={directory}/control-{guest}",
        *(["-device", f"{architecture.line_device},chardev=control"] if architecture.line_device
          else ["-serial", "chardev:control"]),
        "-chardev", f"socket,id=qmp,path={directory}/qmp-{guest}", "-mon", "chardev=qmp,mode=control",
        "-kernel", str(cache["kernel"] / "kernel"), "-initrd", str(cache["kernel"] / "stage1.cpio"),
        "-append", kernel,
        "-drive", f"if=none,id=disk,format=raw,readonly=on,file={cache['disk'] / 'disk.img'}",
        "-device", "virtio-blk-pci,drive=disk",
        *share("kernel", cache["kernel"]),
        *share("lab", directory / "share", writable=True),
        *(topology(scenario, guest) if scenario.topology else plain_slots(scenario, guest)),
        *wire(scenario.guests, guest, directory),
        *(control_plane_port() if with_control_plane else []),
    ]  # fmt: skip
    for netdev in scenario.netdev:
        arguments += ["-netdev", netdev]
    for device in scenario.device:
        arguments += ["-device", device]
    return arguments
