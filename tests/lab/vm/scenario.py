"""What a scenario file asks for, as its header says.

A header line is `# lab: KEY=VALUE …`; the keys and their defaults are the fields of
`Scenario`, explained in the lab's README.
"""

import dataclasses
import pathlib
import re

DIRECTORY = pathlib.Path(__file__).resolve().parent.parent / "scenarios"


# Of pods and of an MPI job, which the lab makes; of our programs, as `make image` leaves it.
IMAGES = ("pods", "mpi", "node")


class BadScenario(Exception):
    """A scenario that does not exist, or a header that cannot be understood."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One file of the scenarios' folder."""

    name: str
    path: pathlib.Path
    summary: str
    guests: int = 1
    # NICs of each guest; all NICs of a scenario are on one wire.
    nics: int = 1
    # Root ports with nothing in them, for hot-plugging.
    ports: int = 0
    # MiB and processors of each guest.
    memory: int = 1024
    cpus: int = 1
    # Of this machine's processors, how many it keeps busy; all of its guests' unless it says otherwise.
    busy: int = 0
    # What the NICs are when the scenario begins: `ethernet`, or `infiniband` HCAs on them.
    fabric: str = "ethernet"
    # NUMA nodes x switches of each x NICs of each, with a display device beside them; instead of nics.
    topology: tuple[int, int, int] | None = None
    # Seconds for the scenario, after the boot.
    timeout: int = 300
    # Container images that are put into the share, of `IMAGES`.
    images: tuple[str, ...] = ()
    # A real cluster: its control plane beside the guests, the programs of its nodes put there.
    kubernetes: bool = False
    # A DNS server beside the control plane, for the names of headless Services; pods reach each other on all nodes.
    dns: bool = False
    # Programs and files of the components that are replaced, from the folder of the cluster's programs.
    peers: tuple[str, ...] = ()
    # The programs of a containerd that reads CDI files are put there, beside the guest's own.
    cdi_containerd: bool = False
    # Binaries under test that it calls.
    binaries: tuple[str, ...] = ()
    # Of the test crate's own programs, those it calls.
    standins: tuple[str, ...] = ()
    # Oldest QEMU it works with.
    qemu: tuple[int, ...] = ()
    # Further arguments of QEMU, and of the guest's kernel.
    netdev: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    kernel: tuple[str, ...] = ()


def _value(key: str, text: str):
    match key:
        case "guests" | "nics" | "ports" | "memory" | "cpus" | "busy" | "timeout":
            return int(text)
        case "topology":
            nodes, switches, nics = text.split("x")
            return (int(nodes), int(switches), int(nics))
        case "images":
            return tuple({image: image for image in IMAGES}[word] for word in text.split(","))
        case "kubernetes" | "dns" | "cdi-containerd":
            return {"yes": True, "no": False}[text]
        case "fabric":
            return {"ethernet": text, "infiniband": text}[text]
        case "binaries" | "standins" | "peers":
            return tuple(text.split(","))
        case "qemu":
            return tuple(int(part) for part in text.split("."))
        case "netdev" | "device" | "kernel":
            return (text,)
    raise KeyError(key)


def parse(path: pathlib.Path) -> Scenario:
    """Reads a scenario's header: its first comment lines."""
    fields: dict = {}
    summary = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.startswith("#"):
            break
        if not (header := re.match(r"# lab:\s+(.*)", line)):
            text = line.lstrip("#! ")
            if not summary and not text.startswith(("shellcheck", "/bin/bash")):
                summary = text
            continue
        for word in header[1].split():
            key, _, text = word.partition("=")
            try:
                value = _value(key, text)
            except (KeyError, ValueError):
                raise BadScenario(f"{path}:{number}: cannot understand {word!r}") from None
            field = key.replace("-", "_")
            more = key in ("netdev", "device", "kernel")
            fields[field] = fields.get(field, ()) + value if more else value
    return Scenario(name=path.stem, path=path, summary=summary, **fields)


def find(names: list[str]) -> list[Scenario]:
    """The named scenarios (a name with a slash is a file's path), or all of them."""
    if not names:
        return [parse(path) for path in sorted(DIRECTORY.glob("*.sh"))]
    found = []
    for name in names:
        path = pathlib.Path(name) if "/" in name else DIRECTORY / f"{name}.sh"
        if not path.is_file():
            raise BadScenario(f"there is no scenario {path}; --list shows what there is")
        found.append(parse(path))
    return found
