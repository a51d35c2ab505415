//! Whether the kernel runs in a virtual machine.

use super::context::Context;
use super::engine::Fact;
use super::read;

/// By the CPU's flags, Xen's directory, or on ARM the firmware's names.
pub(super) fn is_virtual_machine(context: &Context) -> Fact<bool> {
    let (sys, proc) = (&context.host.sys, &context.host.proc);
    let cpuinfo = read::required(context, &proc.join("cpuinfo"))?;
    let name = |name: &str| {
        let name = read::text(context, &sys.join("class/dmi/id").join(name))?;
        Ok(name.unwrap_or_default())
    };
    let is_arm = cpuinfo
        .lines()
        .any(|line| line.starts_with("CPU implementer"));
    let firmware = || {
        Ok([
            name("sys_vendor")?,
            name("product_name")?,
            name("bios_vendor")?,
        ])
    };
    Ok(has_hypervisor_flag(&cpuinfo)
        || sys.join("hypervisor/type").exists()
        || (is_arm && is_virtual(&firmware()?)))
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
}
