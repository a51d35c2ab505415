//! Which GPU a device of a pod is: a table of readers of device IDs, for all vendors. Pure but for
//! [`read`].
//!
//! A device ID means nothing but what its plugin makes of it, so each form is read by its own line
//! of [`FORMS`]. What is certainly a GPU and cannot be found is not the same as no GPU: a pool with
//! `strict` refuses the pod then.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use hca::topology::{Gpu, Machine, gpu};
use hca::{Host, PciAddress};
use node_wire::{ClaimedDevice, PodUnits};

/// What device IDs can mean on this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gpus {
    /// GPUs in order of PCI address.
    pub all: Vec<Gpu>,
    /// PCI functions by their names below `/sys/class/drm`, such as `card0` and `renderD128`.
    pub drm: BTreeMap<String, PciAddress>,
}

/// Reads the GPUs. Their drivers are asked for names, so this can take as long as they do.
///
/// # Errors
/// sysfs cannot be read.
pub fn read(host: &Host) -> hca::Result<Gpus> {
    Ok(Gpus {
        all: gpu::read(host)?,
        drm: drm_names(host),
    })
}

/// PCI functions by their names below `/sys/class/drm`.
fn drm_names(host: &Host) -> BTreeMap<String, PciAddress> {
    let mut drm = BTreeMap::new();
    let entries = std::fs::read_dir(host.sys.join("class/drm"));
    for entry in entries.into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let function = entry.path().join("device").canonicalize();
        let address = function
            .ok()
            .as_deref()
            .and_then(Path::file_name)
            .and_then(|name| name.to_str()?.parse().ok());
        if let Some(address) = address {
            drm.insert(name, address);
        }
    }
    drm
}

/// The GPUs of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodGpus {
    /// By container, as positions in [`Gpus::all`].
    pub of_container: BTreeMap<String, BTreeSet<usize>>,
    /// Devices that are GPUs and were not found, with the reason.
    pub unknown: Vec<String>,
    /// What is worth knowing about the reading.
    pub warnings: Vec<String>,
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Meaning {
    /// This GPU.
    Gpu(usize),
    /// A GPU, but it is not known which one.
    Unknown(String),
    /// This GPU, if the plugin counts as the host does.
    Ordinal(usize),
    /// No GPU.
    Other,
}

/// A device ID as it is read.
struct Device<'a> {
    gpus: &'a Gpus,
    resource: &'a str,
    /// The ID without the number of a replica.
    id: &'a str,
    /// Whether the resource is known to be one of GPUs.
    is_gpu: bool,
    /// Device nodes that the plugin answered for it.
    nodes: &'a dyn Fn(&str) -> BTreeSet<String>,
    /// The whole ID.
    whole: &'a str,
}

/// Reads one form of IDs: `None` if the ID does not have it.
type Form = fn(&Device<'_>) -> Option<Meaning>;

/// All forms, in the order in which they are tried.
const FORMS: [Form; 5] = [nvidia_uuid, nvidia_mig, pci_address, drm_name, ordinal];

/// Resources of GPUs by name; a name that ends in `*` stands for all that begin so.
const RESOURCES: [&str; 9] = [
    "nvidia.com/gpu",
    "nvidia.com/gpu.shared",
    "nvidia.com/mig-*",
    "amd.com/gpu",
    "gpu.intel.com/i915",
    "gpu.intel.com/xe",
    "habana.ai/gaudi",
    "habana.ai/gaudi2",
    "habana.ai/gaudi3",
];

/// The GPUs of a pod by what its containers hold. `nodes` reads the device nodes that a resource's
/// plugin answered for an ID, where the kubelet kept them; `more` are resources of GPUs that the
/// administrator names.
pub fn of_pod(
    units: &PodUnits,
    gpus: &Gpus,
    more: &[String],
    nodes: &dyn Fn(&str, &str) -> BTreeSet<String>,
) -> PodGpus {
    let mut found = PodGpus::default();
    for one in &units.allocations {
        let of_resource = |id: &str| nodes(&one.resource, id);
        for id in &one.units {
            let is_gpu = is_of_gpus(&one.resource, more);
            let meaning = gpus.meaning(&one.resource, id, is_gpu, &of_resource);
            found.note(&one.container, &one.resource, id, meaning);
        }
    }
    for claim in &units.claims {
        let meaning = claimed(claim, gpus);
        found.note(&claim.container, &claim.driver, &claim.device, meaning);
    }
    found
}

impl PodGpus {
    fn note(&mut self, container: &str, resource: &str, id: &str, meaning: Meaning) {
        let gpu = match meaning {
            Meaning::Other => return,
            Meaning::Unknown(why) => {
                return self.unknown.push(format!(
                    "{id} of {resource} in container {container}: {why}"
                ));
            }
            Meaning::Gpu(gpu) => gpu,
            Meaning::Ordinal(gpu) => {
                self.warnings.push(format!(
                    "{id} of {resource} is taken for the GPU that has this number in the order of \
                     PCI addresses; let the GPU's device plugin use UUIDs"
                ));
                gpu
            }
        };
        let of_container = self.of_container.entry(container.to_owned()).or_default();
        of_container.insert(gpu);
    }
}

fn is_of_gpus(resource: &str, more: &[String]) -> bool {
    let known = RESOURCES.iter().any(|name| match name.strip_suffix('*') {
        Some(prefix) => resource.starts_with(prefix),
        None => resource == *name,
    });
    known || more.iter().any(|name| name == resource)
}

/// `GPU-…`: what the driver says in `/proc/driver/nvidia/gpus/*/information`.
fn nvidia_uuid(device: &Device<'_>) -> Option<Meaning> {
    device
        .id
        .starts_with("GPU-")
        .then(|| device.by_uuid(device.id))
}

/// `MIG-…`: a slice. Old drivers name the GPU in it (`MIG-GPU-…/1/0`); of others the parent is
/// known by the node `/dev/nvidia<N>` that the plugin answered, if the kubelet kept it.
fn nvidia_mig(device: &Device<'_>) -> Option<Meaning> {
    let slice = device.id.strip_prefix("MIG-")?;
    if slice.starts_with("GPU-") {
        let parent = slice.split('/').next().unwrap_or(slice);
        return Some(device.by_uuid(parent));
    }
    let nodes = (device.nodes)(device.whole);
    let minors: BTreeSet<u32> = nodes
        .iter()
        .filter_map(|path| path.strip_prefix("/dev/nvidia")?.parse().ok())
        .collect();
    let parent = match minors.len() {
        1 => minors
            .first()
            .and_then(|minor| device.gpus.by_minor(*minor)),
        _ => None,
    };
    Some(parent.map_or_else(
        || {
            Meaning::Unknown(
                "the GPU of a MIG slice is known by the device node that its plugin answered, and \
                 the kubelet's checkpoint has none for it"
                    .into(),
            )
        },
        Meaning::Gpu,
    ))
}

/// A PCI address, as the plugins of AMD and of Intel's Gaudi name their devices.
fn pci_address(device: &Device<'_>) -> Option<Meaning> {
    let address: PciAddress = device.id.parse().ok()?;
    Some(match device.gpus.by_address(address) {
        Some(gpu) => Meaning::Gpu(gpu),
        None if device.is_gpu => Meaning::Unknown(format!("no GPU of this host is at {address}")),
        None => Meaning::Other,
    })
}

/// `card0`, `card0-1`, `renderD128`: a name below `/sys/class/drm`, with the number of a share.
fn drm_name(device: &Device<'_>) -> Option<Meaning> {
    let name = device.id.split('-').next().unwrap_or(device.id);
    let number = name.strip_prefix("card").or(name.strip_prefix("renderD"))?;
    if !device.is_gpu || number.parse::<u32>().is_err() {
        return None;
    }
    let address = device.gpus.drm.get(name);
    let gpu = address.and_then(|address| device.gpus.by_address(*address));
    Some(gpu.map_or_else(
        || Meaning::Unknown(format!("/sys/class/drm/{name} is not a GPU of this host")),
        Meaning::Gpu,
    ))
}

/// `0`: a number that NVIDIA's plugin gives with the strategy `index`.
fn ordinal(device: &Device<'_>) -> Option<Meaning> {
    let number: u32 = device.id.parse().ok()?;
    if !device.is_gpu {
        return None;
    }
    let mut nvidia = device.gpus.all.iter();
    // Other vendors' GPUs are not counted by NVIDIA's plugin.
    let at = match device.resource.starts_with("nvidia.com/") {
        true => {
            let numbered = nvidia.filter(|gpu| gpu.vendor == NVIDIA);
            let gpu = numbered.zip(0_u32..).find(|(_, at)| *at == number);
            gpu.and_then(|(gpu, _)| device.gpus.by_address(gpu.place.address))
        }
        false => nvidia.position(|gpu| gpu.ordinal == number),
    };
    Some(at.map_or_else(
        || Meaning::Unknown(format!("this host has no GPU number {number}")),
        Meaning::Ordinal,
    ))
}

/// PCI vendor ID.
const NVIDIA: u16 = 0x10de;

/// A device by a resource claim: the drivers' names of devices have the minor number of the node
/// (`gpu-0`, `gpu-0-mig-9-4-4`: NVIDIA), the number of the card (`gpu-1-129`: AMD) or the PCI
/// address (`0000-03-00-0-0x56a0`: Intel).
fn claimed(claim: &ClaimedDevice, gpus: &Gpus) -> Meaning {
    let parts: Vec<&str> = claim.device.split('-').collect();
    let second = parts.get(1).and_then(|number| number.parse::<u32>().ok());
    let found = match claim.driver.as_str() {
        "gpu.nvidia.com" if parts.first() == Some(&"gpu") => {
            second.and_then(|minor| gpus.by_minor(minor))
        }
        "gpu.amd.com" if parts.first() == Some(&"gpu") => {
            let address = second.and_then(|card| gpus.drm.get(&format!("card{card}")));
            address.and_then(|address| gpus.by_address(*address))
        }
        "gpu.intel.com" => match parts.as_slice() {
            [domain, bus, slot, function, ..] => {
                let address = format!("{domain}:{bus}:{slot}.{function}").parse().ok();
                address.and_then(|address| gpus.by_address(address))
            }
            _ => None,
        },
        "gpu.nvidia.com" | "gpu.amd.com" => None,
        _ => return Meaning::Other,
    };
    found.map_or_else(
        || Meaning::Unknown("this name of a claimed device is not known".into()),
        Meaning::Gpu,
    )
}

impl Device<'_> {
    fn by_uuid(&self, uuid: &str) -> Meaning {
        let mut all = self.gpus.all.iter();
        // A GPU that is not initialized has question marks for a UUID, which identify no GPU.
        let known = all.position(|gpu| !uuid.contains('?') && gpu.uuid.as_deref() == Some(uuid));
        known.map_or_else(
            || {
                Meaning::Unknown(
                    "no GPU of this host has this UUID in /proc/driver/nvidia/gpus; is its driver \
                     loaded and the GPU initialized?"
                        .into(),
                )
            },
            Meaning::Gpu,
        )
    }
}

impl Gpus {
    fn meaning(
        &self,
        resource: &str,
        whole: &str,
        is_gpu: bool,
        nodes: &dyn Fn(&str) -> BTreeSet<String>,
    ) -> Meaning {
        let device = Device {
            gpus: self,
            resource,
            // Time slicing: GPU-…::3 is the third share.
            id: whole.split("::").next().unwrap_or(whole),
            is_gpu,
            nodes,
            whole,
        };
        let meaning = FORMS.iter().find_map(|form| form(&device));
        meaning.unwrap_or_else(|| match is_gpu {
            true => Meaning::Unknown("this form of a device ID is not known".into()),
            false => Meaning::Other,
        })
    }

    fn by_address(&self, address: PciAddress) -> Option<usize> {
        self.all.iter().position(|gpu| gpu.place.address == address)
    }

    fn by_minor(&self, minor: u32) -> Option<usize> {
        self.all.iter().position(|gpu| gpu.minor == Some(minor))
    }

    /// A machine with these GPUs.
    pub fn in_machine(&self, machine: &Machine) -> Machine {
        Machine {
            gpus: self.all.clone(),
            ..machine.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use hca_trees::{PciSpec, Tree, machine};
    use node_wire::Allocation;

    use super::*;

    fn host() -> (tempfile::TempDir, Gpus) {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        machine::a4(&tree);
        // Minor numbers in another order than PCI addresses, and one GPU that is not initialized.
        for (address, minor) in [("0000:8f:00.0", 7), ("0000:90:00.0", 3)] {
            let uuid = format!("GPU-{}", address.replace([':', '.'], "-"));
            tree.file(
                format!("/proc/driver/nvidia/gpus/{address}/information"),
                format!("Model: \t NVIDIA B200\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}"),
            );
        }
        tree.file(
            "/proc/driver/nvidia/gpus/0000:96:00.0/information",
            "Model: \t NVIDIA B200\nGPU UUID: \t GPU-????????-????-????-????-????????????",
        );
        let amd = PciSpec {
            address: "0000:f1:00.0",
            above: "pci0000:f0/0000:f0:00.0",
            vendor: 0x1002,
            class: 0x12_0000,
            driver: "amdgpu",
            numa_node: 1,
            ..PciSpec::MLX5
        };
        tree.pci(&amd);
        tree.link(
            "/sys/class/drm/card1/device",
            "/sys/bus/pci/devices/0000:f1:00.0",
        );
        let gpus = read(&tree.host()).unwrap();
        (directory, gpus)
    }

    fn found(gpus: &Gpus, resource: &str, id: &str) -> PodGpus {
        let units = PodUnits {
            allocations: vec![Allocation {
                container: "main".into(),
                resource: resource.into(),
                units: vec![id.into()],
                hcas: None,
                pool: None,
            }],
            ..PodUnits::default()
        };
        let nodes = |resource: &str, id: &str| match (resource, id) {
            ("nvidia.com/mig-1g.5gb", "MIG-11") => {
                ["/dev/nvidiactl", "/dev/nvidia7"].map(str::to_owned).into()
            }
            ("nvidia.com/mig-1g.5gb", "MIG-22") => {
                ["/dev/nvidia3", "/dev/nvidia7"].map(str::to_owned).into()
            }
            _ => BTreeSet::new(),
        };
        of_pod(&units, gpus, &["example.com/accelerator".into()], &nodes)
    }

    fn one(found: &PodGpus) -> Option<usize> {
        assert!(found.unknown.is_empty(), "{found:?}");
        found.of_container.get("main")?.first().copied()
    }

    #[test]
    fn each_vendors_ids_are_read() {
        let (_directory, gpus) = host();
        for (resource, id, expected) in [
            ("nvidia.com/gpu", "GPU-0000-8f-00-0", Some(0)),
            ("nvidia.com/gpu.shared", "GPU-0000-90-00-0::3", Some(1)),
            ("renamed.example/x", "GPU-0000-90-00-0", Some(1)),
            ("nvidia.com/mig-1g.5gb", "MIG-GPU-0000-90-00-0/1/0", Some(1)),
            ("nvidia.com/mig-1g.5gb", "MIG-11", Some(0)),
            ("amd.com/gpu", "0000:f1:00.0", Some(8)),
            ("renamed.example/y", "0000:F1:00.0", Some(8)),
            ("amd.com/gpu", "card1", Some(8)),
            ("gpu.intel.com/xe", "card1-7", Some(8)),
            ("example.com/accelerator", "card1", Some(8)),
            // Of other resources these are no GPUs.
            ("rdma/nic", "slot_3e71787e_0", None),
            ("rdma/nic", "0000:91:00.0", None),
            ("example.com/cards", "card1", None),
            ("example.com/fpga", "0", None),
        ] {
            let found = found(&gpus, resource, id);
            assert_eq!(one(&found), expected, "{resource} {id}");
            assert_eq!(found.warnings, Vec::<String>::new());
        }
    }

    #[test]
    fn a_number_is_an_ordinal_with_a_warning() {
        let (_directory, gpus) = host();
        let second = found(&gpus, "nvidia.com/gpu", "1");
        assert_eq!((one(&second), second.warnings.len()), (Some(1), 1));
        // The ninth is AMD's, which NVIDIA's plugin does not count.
        assert_eq!(found(&gpus, "nvidia.com/gpu", "8").unknown.len(), 1);
    }

    #[test]
    fn a_gpu_that_is_not_found_is_unknown_and_never_another_one() {
        let (_directory, gpus) = host();
        for (resource, id) in [
            ("nvidia.com/gpu", "GPU-7c2f"),
            ("nvidia.com/gpu", "GPU-????????-????-????-????-????????????"),
            ("nvidia.com/gpu", "GPU-"),
            ("nvidia.com/mig-1g.5gb", "MIG-GPU-7c2f/1/0"),
            ("nvidia.com/mig-1g.5gb", "MIG-33"),
            ("nvidia.com/mig-1g.5gb", "MIG-22"),
            ("amd.com/gpu", "0000:f2:00.0"),
            ("amd.com/gpu", "0000:91:00.0"),
            ("amd.com/gpu", "card7"),
            ("nvidia.com/gpu", "99"),
            ("nvidia.com/gpu", "moon"),
            ("example.com/accelerator", ""),
        ] {
            let found = found(&gpus, resource, id);
            assert_eq!(found.unknown.len(), 1, "{resource} {id}: {found:?}");
            assert!(found.of_container.is_empty(), "{found:?}");
        }
    }

    #[test]
    fn claimed_gpus_are_found_by_their_drivers_names() {
        let (_directory, gpus) = host();
        let of = |driver: &str, device: &str| {
            let units = PodUnits {
                claims: vec![ClaimedDevice {
                    container: "main".into(),
                    driver: driver.into(),
                    device: device.into(),
                }],
                ..PodUnits::default()
            };
            of_pod(&units, &gpus, &[], &|_, _| BTreeSet::new())
        };
        for (driver, device, expected) in [
            ("gpu.nvidia.com", "gpu-7", Some(0)),
            ("gpu.nvidia.com", "gpu-3-mig-9-4-4", Some(1)),
            ("gpu.amd.com", "gpu-1-129", Some(8)),
            ("gpu.intel.com", "0000-f1-00-0-0x56a0", Some(8)),
            ("dra.net", "gpu0rdma0", None),
        ] {
            assert_eq!(one(&of(driver, device)), expected, "{driver} {device}");
        }
        for (driver, device) in [
            ("gpu.nvidia.com", "gpu-0"),
            ("gpu.nvidia.com", "x"),
            ("gpu.amd.com", "gpu-9-1"),
            ("gpu.intel.com", "0000-03"),
        ] {
            assert_eq!(of(driver, device).unknown.len(), 1, "{driver} {device}");
        }
    }
}
