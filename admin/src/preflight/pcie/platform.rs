//! CPU, kernel and hypervisor, as far as PCIe checks depend on them.

use hca::Host;

use rdma_device_plugin::files;

/// What the machine is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::preflight) struct Platform {
    /// Its CPU is an ARM one, so its IOMMU is an SMMU.
    pub arm: bool,
    /// The kernel runs in a virtual machine.
    pub virtual_machine: bool,
}

/// Reads the host.
pub(in crate::preflight) fn read(host: &Host) -> Platform {
    let sys = |path: &str| files::text(&host.sys.join(path));
    let cpuinfo = files::text(&host.proc.join("cpuinfo")).unwrap_or_default();
    let arm = cpuinfo
        .lines()
        .any(|line| line.starts_with("CPU implementer"));
    let firmware = ["sys_vendor", "product_name", "bios_vendor"]
        .map(|name| sys(&format!("class/dmi/id/{name}")).unwrap_or_default());
    Platform {
        arm,
        virtual_machine: has_hypervisor_flag(&cpuinfo)
            || host.sys.join("hypervisor/type").exists()
            || (arm && is_virtual(&firmware)),
    }
}

/// `hypervisor` among the CPU's flags, where x86 tells it.
fn has_hypervisor_flag(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|line| line.split(' ').any(|flag| flag == "hypervisor"))
}

/// True if the firmware's names are a hypervisor's. An ARM CPU has no flag for it, so this is how
/// systemd-detect-virt decides there. A metal instance of a cloud has its name as vendor, too.
fn is_virtual([vendor, product, bios]: &[String; 3]) -> bool {
    const NAMES: [&str; 8] = [
        "KVM",
        "QEMU",
        "OpenStack",
        "VMware",
        "Xen",
        "Google Compute Engine",
        "Amazon EC2",
        "Hyper-V",
    ];
    if product.contains(".metal") {
        return false;
    }
    let azure = vendor == "Microsoft Corporation" && product == "Virtual Machine";
    let texts = [vendor, product, bios];
    azure
        || NAMES
            .iter()
            .any(|name| texts.iter().any(|text| text.starts_with(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_machines_are_told_by_flag_or_firmware() {
        assert!(has_hypervisor_flag("flags\t: fpu hypervisor aes"));
        assert!(!has_hypervisor_flag("flags\t: fpu aes\nmodel: hypervisor"));
        let names = |names: [&str; 3]| is_virtual(&names.map(str::to_owned));
        assert!(names([
            "QEMU",
            "QEMU Virtual Machine",
            "EFI Development Kit II / OVMF"
        ]));
        assert!(names(["Google", "Google Compute Engine", "Google"]));
        assert!(names(["Amazon EC2", "p6e-gb200.36xlarge", "Amazon EC2"]));
        assert!(names([
            "Microsoft Corporation",
            "Virtual Machine",
            "Microsoft Corporation"
        ]));
        assert!(!names(["Amazon EC2", "c7g.metal", "Amazon EC2"]));
        assert!(!names(["NVIDIA", "GB200 NVL", "NVIDIA"]));
        assert!(!names(["", "", ""]));
    }

    #[test]
    fn a_grace_tray_is_an_arm_machine() {
        let directory = tempfile::tempdir().unwrap();
        let tree = hca_trees::Tree::new(directory.path());
        hca_trees::machine::gb200(&tree);
        let grace = Platform {
            arm: true,
            virtual_machine: false,
        };
        assert_eq!(read(&tree.host()), grace);
        tree.file("/sys/class/dmi/id/sys_vendor", "QEMU");
        let guest = Platform {
            virtual_machine: true,
            ..grace
        };
        assert_eq!(read(&tree.host()), guest);
    }
}
