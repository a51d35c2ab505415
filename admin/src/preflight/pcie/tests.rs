use super::super::tests::{Case, prove};
use super::*;
use crate::verdict::Verdict::{Fail, NotApplicable, Pass, Unknown, Warn};

const GEN5_X16: Lanes = Lanes {
    mega_transfers: 32_000,
    width: 16,
};

fn function(name: &str) -> Function {
    Function {
        name: name.to_owned(),
        rate_mbps: Some(400_000),
        soft: false,
        link: PcieLink {
            current: Some(GEN5_X16),
            most: Some(GEN5_X16),
        },
        port_above: Some(GEN5_X16),
        iommu: None,
        device_control: Register::Value(0x5936),
        nearest: Some(Distance::sure(Class::Pix)),
        direct: true,
        c2c: false,
        data_direct: None,
    }
}

/// A Grace CPU with one GPU and a NIC.
fn grace(change: impl FnOnce(&mut Facts)) -> Facts {
    let mut facts = Facts {
        bridges: Vec::new(),
        platform: Platform {
            arm: true,
            virtual_machine: false,
        },
        ..good()
    };
    let gpu = &mut facts.gpus[0];
    (gpu.c2c, gpu.nearest) = (true, Some(Distance::sure(Class::Node)));
    gpu.iommu = Some("DMA-FQ".to_owned());
    facts.nics[0].iommu = Some("DMA-FQ".to_owned());
    change(&mut facts);
    facts
}

/// The same with a Data Direct function on the GPU's switch.
fn data_direct(change: impl FnOnce(&mut DataDirect)) -> Facts {
    let mut function = DataDirect {
        address: "0009:03:00.0".parse().unwrap(),
        iommu_group: Some(7),
        gpus: vec![("GPU0".to_owned(), Some(7))],
    };
    change(&mut function);
    grace(|facts| facts.nics[0].data_direct = Some(function))
}

fn port(below: Below, control: u16) -> Facts {
    let mut facts = acs(Register::Value(control));
    facts.bridges[0].below = below;
    facts
}

/// Bare metal with one GPU and one NIC on a switch.
fn good() -> Facts {
    Facts {
        nics: vec![function("mlx5_0 0000:91:00.0")],
        gpus: vec![function("GPU0 0000:8f:00.0")],
        bridges: vec![Bridge {
            address: "0000:8e:00.0".parse().unwrap(),
            acs_control: Register::Value(0x0001),
            below: Below::Either,
        }],
        platform: Platform {
            ..Platform::default()
        },
        hides_switches: false,
    }
}

fn nic(change: impl FnOnce(&mut Function)) -> Facts {
    let mut facts = good();
    change(&mut facts.nics[0]);
    facts
}

fn gpu(change: impl FnOnce(&mut Function)) -> Facts {
    let mut facts = good();
    change(&mut facts.gpus[0]);
    facts
}

fn acs(control: Register) -> Facts {
    let mut facts = good();
    facts.bridges[0].acs_control = control;
    facts
}

fn running_at(mega_transfers: u32, width: u32) -> Facts {
    nic(|nic| {
        nic.link.current = Some(Lanes {
            mega_transfers,
            width,
        })
    })
}

fn p01() -> Vec<Case<Facts>> {
    vec![
        ("P01", good(), Pass, ""),
        (
            "P01",
            running_at(16_000, 16),
            Warn,
            "Gen5 x16 would be possible",
        ),
        (
            "P01",
            running_at(16_000, 8),
            Fail,
            "the link carries 126 Gb/s, the ports 400",
        ),
        (
            "P01",
            nic(|nic| {
                let gen4 = Some(Lanes {
                    mega_transfers: 16_000,
                    width: 16,
                });
                (nic.link.current, nic.link.most) = (gen4, gen4);
            }),
            Warn,
            "the link carries 252 Gb/s",
        ),
        (
            "P01",
            nic(|nic| nic.link = PcieLink::default()),
            Unknown,
            "",
        ),
    ]
}

fn no_gpu() -> Facts {
    Facts {
        gpus: Vec::new(),
        bridges: Vec::new(),
        ..good()
    }
}

fn p03() -> Vec<Case<Facts>> {
    vec![
        ("P03", good(), Pass, ""),
        ("P03", acs(Register::Value(0x001d)), Warn, "through the CPU"),
        ("P03", acs(Register::None), Pass, ""),
        ("P03", acs(Register::Unreadable), Unknown, "only root"),
        ("P03", no_gpu(), NotApplicable, ""),
        ("P03", grace(|_| ()), NotApplicable, "over C2C"),
        // What rdma_topo wants of the ports of a Data Direct function and its GPU.
        ("P03", port(Below::DataDirect, 0x0019), Pass, ""),
        ("P03", port(Below::ItsGpu, 0x0015), Pass, ""),
        (
            "P03",
            port(Below::DataDirect, 0x001d),
            Warn,
            "through the CPU",
        ),
        ("P03", port(Below::ItsGpu, 0x001d), Warn, "through the CPU"),
    ]
}

fn p05() -> Vec<Case<Facts>> {
    vec![
        ("P05", good(), Pass, ""),
        (
            "P05",
            nic(|nic| nic.iommu = Some("identity".to_owned())),
            Pass,
            "",
        ),
        (
            "P05",
            gpu(|gpu| gpu.iommu = Some("DMA-FQ".to_owned())),
            Warn,
            "translated",
        ),
        ("P05", grace(|_| ()), Pass, "the SMMU translates"),
        (
            "P05",
            grace(|facts| facts.gpus[0].c2c = false),
            Warn,
            "translated",
        ),
        ("P05", no_gpu(), NotApplicable, ""),
    ]
}

fn p06() -> Vec<Case<Facts>> {
    vec![
        ("P06", good(), Pass, ""),
        (
            "P06",
            nic(|nic| nic.device_control = Register::Value(0x2936)),
            Warn,
            "512 bytes",
        ),
        (
            "P06",
            nic(|nic| nic.device_control = Register::Value(0x5926)),
            Warn,
            "strict ordering",
        ),
        (
            "P06",
            nic(|nic| nic.device_control = Register::Unreadable),
            Unknown,
            "only root",
        ),
    ]
}

fn p08() -> Vec<Case<Facts>> {
    vec![
        ("P08", good(), Pass, ""),
        (
            "P08",
            gpu(|gpu| (gpu.nearest, gpu.direct) = (Some(Distance::sure(Class::Node)), false)),
            Warn,
            "the nearest NIC is at NODE",
        ),
        ("P08", grace(|_| ()), Pass, "joined to the GPU by C2C"),
        (
            "P08",
            grace(|facts| {
                let gpu = &mut facts.gpus[0];
                (gpu.nearest, gpu.direct) = (Some(Distance::sure(Class::Sys)), false);
            }),
            Warn,
            "on another CPU",
        ),
        ("P08", no_gpu(), NotApplicable, ""),
    ]
}

fn p12() -> Vec<Case<Facts>> {
    vec![
        ("P12", grace(|_| ()), NotApplicable, ""),
        ("P12", data_direct(|_| ()), Pass, "they share one"),
        (
            "P12",
            data_direct(|function| function.iommu_group = Some(8)),
            Warn,
            "GPU0 is in another IOMMU group",
        ),
        (
            "P12",
            data_direct(|function| function.gpus.clear()),
            Warn,
            "no GPU shares its switch",
        ),
        (
            "P12",
            data_direct(|function| {
                (function.iommu_group, function.gpus[0].1) = (None, None);
            }),
            Unknown,
            "no IOMMU groups",
        ),
    ]
}

#[test]
fn each_check_says_what_is_wrong() {
    let cases = [p01(), p03(), p05(), p06(), p08(), p12()];
    prove(CHECKS, &cases.concat());
}

#[test]
fn ports_between_gpu_and_nic_are_those_below_the_switch() {
    let directory = tempfile::tempdir().unwrap();
    let tree = hca_trees::Tree::new(directory.path());
    hca_trees::machine::cascaded_switches(&tree);
    let inventory = hca::inventory(&tree.host()).unwrap();
    let machine = Machine::read(
        &tree.host(),
        &inventory,
        hca::topology::gpu::read(&tree.host()).unwrap(),
    )
    .unwrap();
    let ports: Vec<String> = between(&machine).keys().map(ToString::to_string).collect();
    let first_socket: Vec<&String> = ports
        .iter()
        .filter(|port| port.starts_with("0000:2"))
        .collect();
    // Both downstream ports of both switches, the port that leads to the second and its own
    // upstream port; neither root port nor the first switch's upstream port.
    assert_eq!(
        first_socket,
        [
            "0000:22:00.0",
            "0000:22:01.0",
            "0000:22:02.0",
            "0000:25:00.0",
            "0000:26:00.0",
            "0000:26:01.0"
        ]
    );
}

#[test]
fn ports_of_a_data_direct_function_and_its_gpu_are_distinguished() {
    let directory = tempfile::tempdir().unwrap();
    let tree = hca_trees::Tree::new(directory.path());
    hca_trees::machine::gb300(&tree);
    let inventory = hca::inventory(&tree.host()).unwrap();
    let machine = Machine::read(
        &tree.host(),
        &inventory,
        hca::topology::gpu::read(&tree.host()).unwrap(),
    )
    .unwrap();
    let ports = between(&machine);
    assert_eq!(ports.len(), 8);
    assert_eq!(ports[&"0009:02:00.0".parse().unwrap()], Below::DataDirect);
    assert_eq!(ports[&"0009:02:03.0".parse().unwrap()], Below::ItsGpu);
    let nic = &machine.nics[0];
    let devices = tree.path("/sys/bus/pci/devices");
    let function = super::data_direct(&machine, &devices, &nic.place).unwrap();
    assert_eq!(function.address.to_string(), "0009:03:00.0");
    assert_eq!(function.gpus, [("GPU1".to_owned(), None)]);
}
