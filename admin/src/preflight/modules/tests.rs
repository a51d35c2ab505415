use super::super::tests::{Case, prove};
use super::*;
use crate::verdict::Verdict::{Fail, NotApplicable, Pass, Unknown, Warn};

fn function(driver: Option<&str>, rdma: bool) -> Function {
    Function {
        address: "0000:3b:00.0".parse().unwrap(),
        driver: driver.map(str::to_owned),
        rdma,
        in_lag: false,
    }
}

/// A node with two NICs where everything is as it should be.
fn good() -> Facts {
    let modules = ["ib_core", "ib_uverbs", "rdma_ucm", "mlx5_core", "mlx5_ib"];
    Facts {
        release: Some("6.8.0-45-generic".to_owned()),
        modules: modules.map(str::to_owned).into(),
        functions: vec![function(Some("mlx5_core"), true)],
        devices: vec![RdmaDevice::default()],
        driver_container: None,
    }
}

fn with(change: impl FnOnce(&mut Facts)) -> Facts {
    let mut facts = good();
    change(&mut facts);
    facts
}

fn without(module: &str) -> Facts {
    with(|facts| {
        facts.modules.remove(module);
    })
}

fn release(release: &str) -> Facts {
    with(|facts| facts.release = Some(release.to_owned()))
}

fn one_function(function: Function) -> Facts {
    with(|facts| facts.functions = vec![function])
}

fn m01() -> Vec<Case<Facts>> {
    vec![
        ("M01", good(), Pass, ""),
        (
            "M01",
            without("ib_uverbs"),
            Fail,
            "ib_uverbs not in the kernel",
        ),
        ("M01", without("rdma_ucm"), Warn, "no rdma_cm node"),
        ("M01", Facts::default(), NotApplicable, NO_NIC),
    ]
}

fn m02() -> Vec<Case<Facts>> {
    vec![
        ("M02", good(), Pass, ""),
        (
            "M02",
            one_function(function(None, false)),
            Fail,
            "no driver",
        ),
        (
            "M02",
            with(|facts| {
                facts.functions = vec![function(Some("mlx5_core"), false)];
                facts.modules.remove("mlx5_ib");
            }),
            Fail,
            "mlx5_ib is not in the kernel",
        ),
        (
            "M02",
            one_function(function(Some("vfio-pci"), false)),
            NotApplicable,
            "virtual machine",
        ),
        (
            "M02",
            one_function(function(Some("i40e"), false)),
            NotApplicable,
            "unless irdma",
        ),
        (
            "M02",
            one_function(function(Some("mlxfw"), false)),
            Unknown,
            "mlxfw",
        ),
    ]
}

fn m03() -> Vec<Case<Facts>> {
    vec![
        ("M03", good(), Pass, ""),
        (
            "M03",
            one_function(function(Some("mlx5_core"), false)),
            Fail,
            "disabled",
        ),
        (
            "M03",
            one_function(Function {
                in_lag: true,
                ..function(Some("mlx5_core"), false)
            }),
            Pass,
            "bond",
        ),
        (
            "M03",
            with(|facts| {
                facts.functions = vec![function(Some("ice"), false)];
                facts.modules.insert("irdma".to_owned());
            }),
            Warn,
            "irdma made no RDMA device",
        ),
        (
            "M03",
            with(|facts| {
                facts.devices.clear();
                facts.functions = vec![function(Some("bnxt_en"), false)];
            }),
            Fail,
            "no RDMA device on this node",
        ),
    ]
}

fn m04() -> Vec<Case<Facts>> {
    vec![
        ("M04", good(), NotApplicable, ""),
        (
            "M04",
            with(|facts| facts.driver_container = Some(true)),
            Pass,
            "",
        ),
        (
            "M04",
            with(|facts| facts.driver_container = Some(false)),
            Fail,
            "not done",
        ),
    ]
}

fn m08() -> Vec<Case<Facts>> {
    vec![
        ("M08", good(), Pass, ""),
        ("M08", release("5.10.0-28-amd64"), Fail, "before 5.14"),
        ("M08", release("5.13.19-2-pve"), Fail, "before 5.14"),
        ("M08", release("5.14.0-427.el9.x86_64"), Pass, ""),
        ("M08", release("unreleased"), Unknown, ""),
        ("M08", with(|facts| facts.release = None), Unknown, ""),
    ]
}

#[test]
fn each_check_says_what_is_wrong() {
    let cases = [m01(), m02(), m03(), m04(), m08()];
    prove(CHECKS, &cases.concat());
}

#[test]
fn releases_of_distributions_are_understood() {
    for (release, expected) in [
        ("6.1.0-23-amd64", Some((6, 1))),
        ("5.14.0-427.el9.x86_64", Some((5, 14))),
        ("6.18-rc1", Some((6, 18))),
        ("", None),
        ("x", None),
    ] {
        assert_eq!(version(release), expected, "{release}");
    }
}
