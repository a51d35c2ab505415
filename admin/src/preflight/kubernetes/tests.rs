use super::super::tests::{Case, prove};
use super::*;
use crate::verdict::Verdict::{Fail, NotApplicable, Pass, Unknown, Warn};

fn good() -> Facts {
    let nic = "0000:3b:00.0".to_owned();
    Facts {
        kubelet: true,
        plugin_dir: Some(PluginDir {
            path: "/var/lib/kubelet/device-plugins".to_owned(),
            writable: true,
            socket: true,
        }),
        pod_resources: Ok(()),
        policies: Some(Policies {
            cpu: "static".to_owned(),
            topology: "single-numa-node".to_owned(),
            scope: "pod".to_owned(),
        }),
        numa_nodes_with_cpus: 2,
        programs_in_sight: true,
        configurations_in_sight: true,
        registered: [("rdma/rails".to_owned(), vec![nic.clone()])].into(),
        nics: vec![nic],
        programs: vec![("rdma-netdev".to_owned(), Some("0.1.0".to_owned()))],
        version: "0.1.0".to_owned(),
        cni_configurations: vec!["00-multus.conf".to_owned()],
        stores: Ok(vec![("default".to_owned(), Ok("it is there".to_owned()))]),
    }
}

fn with(change: impl FnOnce(&mut Facts)) -> Facts {
    let mut facts = good();
    change(&mut facts);
    facts
}

fn policy(topology: &str, cpu: &str) -> Facts {
    with(|facts| {
        let policies = facts.policies.as_mut().unwrap();
        topology.clone_into(&mut policies.topology);
        cpu.clone_into(&mut policies.cpu);
    })
}

fn k01() -> Vec<Case<Facts>> {
    let bare = || with(|facts| facts.kubelet = false);
    vec![
        ("K01", good(), Pass, ""),
        ("K01", bare(), NotApplicable, "no kubelet"),
        (
            "K01",
            with(|facts| facts.plugin_dir = None),
            Fail,
            "is not there",
        ),
        (
            "K01",
            with(|f| f.plugin_dir.as_mut().unwrap().writable = false),
            Fail,
            "not writable",
        ),
        (
            "K01",
            with(|f| f.plugin_dir.as_mut().unwrap().socket = false),
            Fail,
            "socket is not",
        ),
    ]
}

fn k02() -> Vec<Case<Facts>> {
    vec![
        ("K02", good(), Pass, ""),
        (
            "K02",
            with(|facts| facts.pod_resources = Err(client::Error::NoSocket("kubelet.sock".into()))),
            Fail,
            "Multus cannot assign",
        ),
        (
            "K02",
            with(|f| {
                f.pod_resources = Err(client::Error::Call {
                    socket: "kubelet.sock".into(),
                    cause: "refused".to_owned(),
                })
            }),
            Fail,
            "refused",
        ),
    ]
}

fn k03() -> Vec<Case<Facts>> {
    vec![
        ("K03", good(), Pass, ""),
        ("K03", policy("best-effort", "none"), Warn, "no promise"),
        ("K03", policy("restricted", "none"), Warn, "CPUs are not"),
        ("K03", with(|facts| facts.policies = None), Unknown, ""),
        (
            "K03",
            Facts {
                numa_nodes_with_cpus: 1,
                ..policy("none", "none")
            },
            Pass,
            "but one",
        ),
    ]
}

fn k07() -> Vec<Case<Facts>> {
    let slots = || {
        vec![format!(
            "0000:3b:00.0_{}_0",
            hca::unit::PoolTag::of("rdma/x")
        )]
    };
    vec![
        ("K07", good(), Pass, ""),
        (
            "K07",
            with(|facts| {
                facts.registered.insert("other/nic".to_owned(), slots());
            }),
            Fail,
            "two pods would have it",
        ),
        (
            "K07",
            with(|facts| {
                facts.registered =
                    [("a/x".to_owned(), slots()), ("a/y".to_owned(), slots())].into();
            }),
            Pass,
            "shared",
        ),
        (
            "K07",
            with(|facts| facts.registered.clear()),
            NotApplicable,
            "",
        ),
    ]
}

fn k08() -> Vec<Case<Facts>> {
    vec![
        ("K08", good(), Pass, ""),
        (
            "K08",
            with(|facts| facts.programs[0].1 = None),
            Warn,
            "not there",
        ),
        (
            "K08",
            with(|f| f.programs[0].1 = Some("0.0.9".to_owned())),
            Warn,
            "version 0.0.9",
        ),
        (
            "K08",
            with(|facts| facts.cni_configurations.clear()),
            Warn,
            "no pod network",
        ),
        (
            "K08",
            with(|facts| facts.programs_in_sight = false),
            Unknown,
            "--cni-bin-dir",
        ),
        (
            "K08",
            with(|facts| {
                facts.configurations_in_sight = false;
                facts.cni_configurations.clear();
            }),
            Pass,
            "the same version",
        ),
    ]
}

fn k09() -> Vec<Case<Facts>> {
    let wrong_store = Err(("directory is gone".to_owned(), "mount it".to_owned()));
    vec![
        ("K09", good(), Pass, ""),
        (
            "K09",
            with(|f| f.stores = Ok(vec![("a".to_owned(), wrong_store)])),
            Fail,
            "is gone",
        ),
        (
            "K09",
            with(|facts| facts.stores = Err("line 3".to_owned())),
            Fail,
            "line 3",
        ),
    ]
}

#[test]
fn each_check_says_what_is_wrong() {
    let cases = [k01(), k02(), k03(), k07(), k08(), k09()];
    prove(CHECKS, &cases.concat());
}
