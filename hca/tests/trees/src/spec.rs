//! Descriptions of hardware to lay.

/// What a class device stands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On<'a> {
    /// A PCI function laid before.
    Pci(&'a str),
    /// A virtio device below a PCI function laid before: function, device.
    Virtio(&'a str, &'a str),
    /// An auxiliary device laid before.
    Auxiliary(&'a str),
    /// A device of Hyper-V's bus: channel, driver.
    Vmbus(&'a str, &'a str),
    /// Nothing: a soft or virtual device.
    Nothing,
}

/// A PCI function.
#[derive(Debug, Clone, Copy)]
pub struct PciSpec<'a> {
    /// Its address.
    pub address: &'a str,
    /// Root and bridges above it, as in `pci0000:3a/0000:3a:00.0`.
    pub above: &'a str,
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Class code.
    pub class: u32,
    /// Bound driver; empty for none.
    pub driver: &'a str,
    /// NUMA node, -1 for none.
    pub numa_node: i32,
    /// VFs the hardware allows; 0 for a function without SR-IOV.
    pub total_vfs: u32,
}

impl PciSpec<'_> {
    /// A ConnectX-7 function.
    pub const MLX5: PciSpec<'static> = PciSpec {
        address: "0000:3b:00.0",
        above: "pci0000:3a/0000:3a:00.0",
        vendor: 0x15b3,
        device: 0x1021,
        class: 0x02_0000,
        driver: "mlx5_core",
        numa_node: -1,
        total_vfs: 16,
    };
    /// An NVIDIA GPU.
    pub const GPU: PciSpec<'static> = PciSpec {
        address: "0000:3c:00.0",
        above: "pci0000:3a/0000:3a:01.0",
        vendor: 0x10de,
        device: 0x2330,
        class: 0x03_0200,
        driver: "nvidia",
        numa_node: -1,
        total_vfs: 0,
    };
}

/// A netdev.
#[derive(Debug, Clone, Copy)]
pub struct NetdevSpec<'a> {
    /// Name.
    pub name: &'a str,
    /// What it stands on.
    pub on: On<'a>,
    /// Link-layer address.
    pub mac: &'a str,
    /// MTU in bytes.
    pub mtu: u32,
    /// Up with carrier, or down.
    pub up: bool,
    /// ARPHRD number: 1 Ethernet, 32 IPoIB.
    pub link_type: u16,
    /// Speed in Mb/s.
    pub speed: u32,
    /// Port of its hardware, from 0.
    pub dev_port: u32,
    /// Physical port name; empty where the driver does not report it.
    pub phys_port_name: &'a str,
    /// `DEVTYPE` of the uevent; empty for hardware.
    pub kind: &'a str,
    /// Netdevs below it.
    pub lowers: &'a [&'a str],
}

impl Default for NetdevSpec<'_> {
    fn default() -> Self {
        Self {
            name: "eth0",
            on: On::Nothing,
            mac: "b8:59:9f:00:00:01",
            mtu: 9000,
            up: true,
            link_type: 1,
            speed: 100_000,
            dev_port: 0,
            phys_port_name: "",
            kind: "",
            lowers: &[],
        }
    }
}

/// An RDMA device.
#[derive(Debug, Clone, Copy)]
pub struct RdmaSpec<'a> {
    /// Name.
    pub name: &'a str,
    /// What it stands on.
    pub on: On<'a>,
    /// Node GUID.
    pub node_guid: &'a str,
    /// Node type as sysfs says it.
    pub node_type: &'a str,
    /// The netdev that soft RoCE says it stands on; empty for other drivers.
    pub soft_parent: &'a str,
    /// Firmware, board and chip are reported, as mlx5 does.
    pub vendor_attributes: bool,
    /// Ports, from number 1.
    pub ports: &'a [PortSpec<'a>],
    /// Management nodes (`umad`, `issm`) exist.
    pub mad: bool,
    /// The verbs node exists.
    pub verbs: bool,
}

impl Default for RdmaSpec<'_> {
    fn default() -> Self {
        Self {
            name: "mlx5_0",
            on: On::Nothing,
            node_guid: "b859:9f03:0000:0001",
            node_type: "1: CA",
            soft_parent: "",
            vendor_attributes: true,
            ports: &[PortSpec::ROCE],
            mad: true,
            verbs: true,
        }
    }
}

/// A port.
#[derive(Debug, Clone, Copy)]
pub struct PortSpec<'a> {
    /// Logical state as sysfs says it.
    pub state: &'a str,
    /// Physical state as sysfs says it.
    pub phys_state: &'a str,
    /// Rate as sysfs says it.
    pub rate: &'a str,
    /// Link layer as sysfs says it.
    pub link_layer: &'a str,
    /// LID.
    pub lid: u16,
    /// Filled GID entries: index, GID, type, netdev (empty for none).
    pub gids: &'a [(u32, &'a str, &'a str, &'a str)],
    /// Size of the GID table.
    pub gid_entries: u32,
    /// Partition keys from index 0.
    pub pkeys: &'a [u16],
}

impl PortSpec<'_> {
    /// An active RoCE port without an address.
    pub const ROCE: PortSpec<'static> = PortSpec {
        state: "4: ACTIVE",
        phys_state: "5: LinkUp",
        rate: "100 Gb/sec (4X EDR)",
        link_layer: "Ethernet",
        lid: 0,
        gids: &[],
        gid_entries: 16,
        pkeys: &[0xffff],
    };
    /// An active InfiniBand port.
    pub const INFINIBAND: PortSpec<'static> = PortSpec {
        state: "4: ACTIVE",
        phys_state: "5: LinkUp",
        rate: "400 Gb/sec (4X NDR)",
        link_layer: "InfiniBand",
        lid: 7,
        gids: &[(
            0,
            "fe80:0000:0000:0000:b859:9f03:0000:0001",
            "IB/RoCE v1",
            "",
        )],
        gid_entries: 8,
        pkeys: &[0xffff],
    };
    /// A port without a cable.
    pub const DOWN: PortSpec<'static> = PortSpec {
        state: "1: DOWN",
        phys_state: "3: Disabled",
        rate: "40 Gb/sec (4X QDR)",
        ..PortSpec::ROCE
    };
}
