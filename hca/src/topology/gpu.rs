//! GPUs and other accelerators, found by PCI class and vendor: no driver library is asked.

use serde::Serialize;

use super::distance::{Class, PciLocation};
use crate::host::{self, Host, Result};
use crate::pci::{self, PciFunction};

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Gpu {
    /// Position in order of PCI address: the index that `nvidia-smi` and CUDA (with
    /// `CUDA_DEVICE_ORDER=PCI_BUS_ID`) use.
    pub ordinal: u32,
    /// Where it sits.
    pub place: PciLocation,
    /// PCI vendor ID.
    pub vendor: u16,
    /// PCI device ID.
    pub device: u16,
    /// The bound driver, such as `nvidia` or `vfio-pci`.
    pub driver: Option<String>,
    /// Product name, where the driver says it without being asked by its own library.
    pub model: Option<String>,
    /// The vendor's unique name of it (`GPU-…`), which is what NVIDIA's device plugin hands to
    /// the kubelet.
    pub uuid: Option<String>,
    /// Number of its node `/dev/nvidia<N>`, which is not the ordinal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// It is joined to its CPU by a coherent link (`NVLink-C2C` of Grace Hopper and Grace Blackwell):
    /// what reaches the CPU's memory reaches its memory as well, at that link's speed.
    pub c2c: bool,
    /// NUMA node that its memory is, where the driver gave it to the kernel as one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_node: Option<u32>,
}

impl Gpu {
    /// True if a NIC at this distance reads and writes the GPU's memory itself, without a copy
    /// through host memory: below the host bridge, or over the coherent link of the CPU that has
    /// them both. NCCL decides alike (`NCCL_NET_GDR_LEVEL`, and `NCCL_NET_GDR_C2C`, which is on by
    /// default).
    #[must_use]
    pub fn is_direct_at(&self, class: Class) -> bool {
        class.is_peer_to_peer() || (self.c2c && class <= Class::Node)
    }

    /// Notes what files of `/proc/driver/nvidia/gpus/<address>` have.
    fn ask_nvidia(&mut self, host: &Host) -> Result<()> {
        let name = format!("driver/nvidia/gpus/{}", self.place.address);
        let directory = host.proc.join(name);
        let text = host::attribute(&directory, "information")?.unwrap_or_default();
        // Only there where the GPU's memory can be a NUMA node (`nv_platform_supports_numa`).
        let numa = host::attribute(&directory, "numa_status")?;
        self.c2c |= numa.is_some();
        self.memory_node = numa.as_deref().and_then(memory_node);
        self.model = line(&text, "Model");
        // Question marks until the GPU is initialized: that is not a name of it.
        self.uuid = line(&text, "GPU UUID").filter(|uuid| !uuid.contains('?'));
        self.minor = line(&text, "Device Minor").and_then(|minor| minor.parse().ok());
        Ok(())
    }

    /// Product name, or vendor and device ID where the driver does not say.
    #[must_use]
    pub fn title(&self) -> String {
        match (&self.model, vendor(self.vendor)) {
            (Some(model), _) => model.clone(),
            (None, Some(vendor)) => format!("{vendor} {:04x}", self.device),
            (None, None) => format!("{:04x}:{:04x}", self.vendor, self.device),
        }
    }
}

/// Vendors of accelerators. A display controller of anybody else is a board's management
/// graphics or a hypervisor's.
const VENDORS: [(u16, &str); 6] = [
    (0x10de, "NVIDIA"),
    (0x1002, "AMD"),
    (0x8086, "Intel"),
    (0x1da3, "Habana"),
    (0x1ed5, "Moore Threads"),
    (0x19e5, "Huawei"),
];

/// GPUs with a coherent link to their CPU: GH200, GB200, GB300 (the table of
/// `drivers/vfio/pci/nvgrace-gpu/main.c`).
const WITH_C2C: [u16; 5] = [0x2342, 0x2345, 0x2348, 0x2941, 0x31c2];

fn vendor(id: u16) -> Option<&'static str> {
    let found = VENDORS.iter().find(|(vendor, _)| *vendor == id);
    found.map(|(_, name)| *name)
}

/// True if a PCI function is a GPU in its own right.
///
/// Class codes: display controllers (`03`) of an accelerator vendor, 3D controllers (`0302`: no
/// screen attached) of any, processing accelerators (`12`) of an accelerator vendor. Left out are
/// Intel's integrated graphics, which always is device 2 of the first bus, and virtual functions
/// whose physical function is here too: they are slices of a GPU that is listed already. A VF
/// passed into a virtual machine has no physical function there, and counts.
#[must_use]
pub fn is_gpu(function: &PciFunction) -> bool {
    let known = vendor(function.vendor).is_some();
    let accelerator = match function.class >> 16 {
        0x03 => known || function.class >> 8 == 0x0302,
        0x12 => known,
        _ => false,
    };
    let address = function.address;
    let integrated =
        function.vendor == 0x8086 && (address.domain, address.bus, address.device) == (0, 0, 2);
    accelerator && !integrated && !function.is_vf()
}

/// All GPUs, in order of PCI address.
///
/// # Errors
/// [`host::Error::Read`] if sysfs cannot be read.
pub fn read(host: &Host) -> Result<Vec<Gpu>> {
    let mut gpus = places(host)?;
    // Where its driver does not answer, the GPU is there without a name.
    gpus.iter_mut()
        .try_for_each(|gpu| match gpu.ask_nvidia(host) {
            Err(error) if error.is_of_one_object() => Ok(()),
            asked => asked,
        })?;
    Ok(gpus)
}

/// The same by the PCI tree alone, without names: no driver is asked.
///
/// # Errors
/// As [`read`].
pub fn places(host: &Host) -> Result<Vec<Gpu>> {
    let mut gpus = Vec::new();
    for (address, directory) in pci::directories(host)? {
        // The class alone first: a node may have thousands of virtual functions.
        let class = host::hexadecimal(&directory, "class")?.unwrap_or_default();
        if !matches!(class >> 16, 0x03 | 0x12) {
            continue;
        }
        let function = pci::read_at(&directory, address)?;
        if !is_gpu(&function) {
            continue;
        }
        gpus.push(Gpu {
            ordinal: u32::try_from(gpus.len()).unwrap_or(u32::MAX),
            place: PciLocation::of(&function),
            vendor: function.vendor,
            device: function.device,
            driver: function.driver,
            model: None,
            uuid: None,
            minor: None,
            // By number, since a driver that keeps the memory for itself says nothing of it.
            c2c: function.vendor == 0x10de && WITH_C2C.contains(&function.device),
            memory_node: None,
        });
    }
    Ok(gpus)
}

/// The node of `numa_status`; `None` (the driver's -1 too) while the memory is not online.
fn memory_node(status: &str) -> Option<u32> {
    let online = line(status, "Status").is_some_and(|status| status == "online");
    let node = line(status, "Node")?.parse().ok();
    node.filter(|_| online)
}

/// The value of a `Key: value` line.
fn line(text: &str, key: &str) -> Option<String> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = lines.find(|(name, _)| name.trim() == key)?;
    Some(value.trim().to_owned()).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::Sriov;

    fn function(address: &str, vendor: u16, class: u32, sriov: Sriov) -> PciFunction {
        PciFunction {
            address: address.parse().unwrap(),
            vendor,
            device: 0x2901,
            class,
            driver: None,
            numa_node: None,
            acpi_index: None,
            sriov,
            root: None,
            chain: Vec::new(),
        }
    }

    #[test]
    fn accelerators_are_distinguished_from_other_display_controllers() {
        let cases = [
            (
                "0000:8f:00.0",
                0x10de,
                0x03_02_00,
                true,
                "a data-centre GPU",
            ),
            (
                "0000:8f:00.0",
                0x10de,
                0x03_00_00,
                true,
                "a GPU with screens",
            ),
            ("0000:8f:00.0", 0x1002, 0x03_80_00, true, "an AMD Instinct"),
            (
                "0000:8f:00.0",
                0x1002,
                0x12_00_00,
                true,
                "a newer AMD Instinct",
            ),
            ("0000:8f:00.0", 0x1da3, 0x12_00_00, true, "a Gaudi"),
            (
                "0000:8f:00.0",
                0x8086,
                0x03_80_00,
                true,
                "an Intel data-centre GPU",
            ),
            (
                "0000:00:02.0",
                0x8086,
                0x03_00_00,
                false,
                "Intel's integrated graphics",
            ),
            (
                "0000:02:00.0",
                0x1a03,
                0x03_00_00,
                false,
                "a BMC's graphics",
            ),
            (
                "0000:00:01.0",
                0x1234,
                0x03_00_00,
                false,
                "a hypervisor's graphics",
            ),
            ("0000:8f:00.0", 0x10de, 0x06_80_00, false, "an NVSwitch"),
            ("0000:8f:00.1", 0x10de, 0x04_03_00, false, "a GPU's sound"),
            ("0000:8f:00.0", 0x15b3, 0x02_00_00, false, "a NIC"),
            ("0000:8f:00.0", 0x10ee, 0x12_00_00, false, "an FPGA card"),
        ];
        for (address, vendor, class, expected, what) in cases {
            assert_eq!(
                is_gpu(&function(address, vendor, class, Sriov::None)),
                expected,
                "{what}"
            );
        }
    }

    #[test]
    fn slices_of_a_listed_gpu_are_not_gpus() {
        let physical = "0000:8f:00.0".parse().unwrap();
        let vf = Sriov::Virtual {
            physical,
            index: Some(0),
        };
        assert!(!is_gpu(&function("0000:8f:00.4", 0x10de, 0x03_02_00, vf)));
        let pf = Sriov::Physical {
            total: 16,
            functions: Vec::new(),
        };
        assert!(is_gpu(&function("0000:8f:00.0", 0x10de, 0x03_02_00, pf)));
    }

    #[test]
    fn memory_is_a_numa_node_only_while_it_is_online() {
        let status =
            |node, status| format!("Node:      {node}\nStatus:    {status}\nSize:      2f0000");
        assert_eq!(memory_node(&status(2, "online")), Some(2));
        assert_eq!(memory_node(&status(2, "offline")), None);
        assert_eq!(memory_node(&status(-1, "online")), None);
        assert_eq!(memory_node(""), None);
    }

    #[test]
    fn the_nvidia_driver_reports_model_and_uuid() {
        let text =
            "Model: \t\t NVIDIA B200\nIRQ:   \t\t 430\nGPU UUID: \t GPU-1f2e\nBus Type: \t PCIe";
        assert_eq!(line(text, "Model").as_deref(), Some("NVIDIA B200"));
        assert_eq!(line(text, "GPU UUID").as_deref(), Some("GPU-1f2e"));
        assert_eq!(line(text, "Firmware"), None);
    }
}
